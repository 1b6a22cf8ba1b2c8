//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// ErrUnsupported is in the error of [New] and [Probe] where the system lacks
// something.
var ErrUnsupported = errors.New("ipvs: cannot be used")

// UnsupportedError says what the system lacks. It is [ErrUnsupported].
type UnsupportedError struct {
	// Feature is what is missing: a kernel module or a program.
	Feature string
	// Err is what the system said.
	Err error
}

// Error says what is missing.
func (e *UnsupportedError) Error() string {
	if errors.Is(e.Err, unix.EPERM) {
		return fmt.Sprintf("%v: %s: CAP_NET_ADMIN is needed, in the initial user namespace: %v", ErrUnsupported, e.Feature, e.Err)
	}
	return fmt.Sprintf("%v: %s: %v", ErrUnsupported, e.Feature, e.Err)
}

// Unwrap makes errors.Is find [ErrUnsupported] and the system's error.
func (e *UnsupportedError) Unwrap() []error { return []error{ErrUnsupported, e.Err} }

// errNoIPVS wraps what dialKernel returned.
func errNoIPVS(err error) error {
	return &UnsupportedError{Feature: "IPVS (module ip_vs)", Err: err}
}

// errIPv6Disabled is in the error of probe where IPv6 is turned off.
var errIPv6Disabled = errors.New("it is disabled: net.ipv6.conf.all.disable_ipv6 is 1, or the kernel was booted without IPv6")

// ipv6Disabled reports whether IPv6 is turned off in the calling thread's namespace.
// The addresses of Services cannot be bound then.
func ipv6Disabled() bool {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
		return true
	}
	value, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err == nil && strings.TrimSpace(string(value)) != "0"
}

// Probe reports whether a [Backend] with the configuration would find all it
// needs: nil, an [*UnsupportedError] that names the kernel module or program that
// is missing, or an error of the configuration. [New] does the same.
func Probe(c Config) error {
	b, err := New(c)
	if err != nil {
		return err
	}
	return b.Close()
}

// probe tries the schedulers, with virtual servers at addresses for documentation
// (RFC 5737, RFC 3849), and looks for ipset and for IPv6.
func (b *Backend) probe() error {
	wanted := []Scheduler{b.config.Scheduler}
	if b.config.Scheduler == "" {
		wanted = []Scheduler{RoundRobin, WeightedRoundRobin}
	}
	for _, f := range b.config.Families {
		if f == tracker.IPv6 && ipv6Disabled() {
			return &UnsupportedError{Feature: "IPv6", Err: errIPv6Disabled}
		}
		for _, s := range wanted {
			if err := b.tryScheduler(f, s); err != nil {
				return err
			}
		}
	}
	if err := b.tryScheduler(b.config.Families[0], Maglev); errors.Is(err, unix.ENOENT) {
		b.config.noMaglev = true
		b.config.Log.Warn("ipvs: Services that ask for a hash get the scheduler sh", slog.Any("reason", err))
	} else if err != nil {
		return err
	}
	if _, err := b.sets.header("KUBE-PROBE"); err != nil && !errors.Is(err, unix.ENOENT) {
		return &UnsupportedError{Feature: "ipset (module ip_set)", Err: err}
	}
	return nil
}

// tryScheduler makes a virtual server with the scheduler, and removes it. Others may
// be doing the same, where this process's namespace is theirs.
func (b *Backend) tryScheduler(f tracker.Family, s Scheduler) error {
	addr := netip.AddrFrom4([4]byte{198, 51, 100, 0})
	if f == tracker.IPv6 {
		addr = netip.MustParseAddr("2001:db8::")
	}
	k := virtualKey{family: f, proto: inet.TCP, at: netip.AddrPortFrom(addr, 20000)}
	if err := b.kernel.addVirtual(k, virtual{scheduler: s, flags: s.flags(b.config.Hash)}); err != nil {
		return &UnsupportedError{Feature: fmt.Sprintf("scheduler %s over %s (module ip_vs_%s)", s, f, s), Err: err}
	}
	if err := b.kernel.delVirtual(k); err != nil {
		return fmt.Errorf("ipvs: probe: %w", err)
	}
	return nil
}
