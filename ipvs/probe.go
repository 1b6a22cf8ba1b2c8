package ipvs

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"syscall"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// unsupported returns a [*dataplane.UnsupportedError] unless the kernel refused for a temporary
// reason.
func unsupported(f tracker.Family, feature string, err error) error {
	if backendconf.Temporary(err) {
		return fmt.Errorf("ipvs: cannot probe %s: %w", feature, err)
	}
	if errors.Is(err, syscall.EPERM) {
		err = fmt.Errorf("CAP_NET_ADMIN is needed in the initial user namespace: %w", err)
	}
	return &dataplane.UnsupportedError{Backend: "ipvs", Family: f, Feature: feature, Err: err}
}

// errIPv6Disabled is wrapped by the error of probe if IPv6 is turned off.
var errIPv6Disabled = errors.New("net.ipv6.conf.all.disable_ipv6 is 1, or the kernel was booted without IPv6")

// probe tries the schedulers, with virtual servers at addresses for documentation
// (RFC 5737, RFC 3849), and checks for ipset and IPv6.
func (b *Backend) probe() error {
	wanted := []Scheduler{b.config.Scheduler}
	if b.config.Scheduler == "" {
		wanted = []Scheduler{RoundRobin, WeightedRoundRobin}
	}
	disabled, err := b.kernel.ipv6Disabled()
	if err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	for _, f := range b.config.Families {
		if f == tracker.IPv6 && disabled {
			return unsupported(f, "binding addresses", errIPv6Disabled)
		}
		for _, s := range wanted {
			if err := b.tryScheduler(f, s); err != nil {
				return err
			}
		}
	}
	if err := b.tryScheduler(b.config.Families[0], Maglev); errors.Is(err, syscall.ENOENT) {
		b.config.noMaglev = true
		b.config.Log.Warn("ipvs: no scheduler mh, services that ask for a hash get sh", slog.Any("error", err))
	} else if err != nil {
		return err
	}
	b.config.onlyIPIP = !atLeast(b.kernel.release(), 5, 3)
	b.config.lacked = map[Scheduler]bool{}
	for _, s := range b.config.Schedulers {
		if err := b.tryScheduler(b.config.Families[0], s); errors.Is(err, syscall.ENOENT) {
			b.config.lacked[s] = true
		} else if err != nil {
			return err
		}
	}
	if err := b.kernel.hasSets(); err != nil {
		return unsupported(0, "ipset (module ip_set)", err)
	}
	return nil
}

// tryScheduler adds a virtual server with the scheduler, and deletes it. Another process may do the same
// concurrently.
func (b *Backend) tryScheduler(f tracker.Family, s Scheduler) error {
	addr := netip.AddrFrom4([4]byte{198, 51, 100, 0})
	if f == tracker.IPv6 {
		addr = netip.MustParseAddr("2001:db8::")
	}
	k := virtualKey{family: f, proto: inet.TCP, at: netip.AddrPortFrom(addr, 20000)}
	if err := b.kernel.addVirtual(k, virtual{scheduler: s, flags: s.flags(tracker.HashNone)}); err != nil {
		return unsupported(f, fmt.Sprintf("scheduler %s (module ip_vs_%s)", s, s), err)
	}
	if err := b.kernel.delVirtual(k); err != nil {
		return fmt.Errorf("ipvs: cannot probe scheduler %s: %w", s, err)
	}
	return nil
}
