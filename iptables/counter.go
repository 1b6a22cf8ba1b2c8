//go:build linux

package iptables

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/iptables/internal/nfacct"
	"github.com/go-proxier/proxier/tracker"
)

// The names of the kernel's accounting objects that rules count into, kube-proxy's.
const (
	// InvalidDropped counts packets to be forwarded that connection tracking takes
	// for invalid, and that were dropped therefore.
	InvalidDropped = "ct_state_invalid_dropped_pkts"
	// LocalhostNodePorts counts first packets of connections to NodePorts at IPv4
	// loopback addresses ([Config.LocalhostNodePorts]).
	LocalhostNodePorts = "localhost_nps_accepted_pkts"
)

// Counter is what an accounting object of the kernel's (linux/netfilter/nfnetlink_acct.h,
// the program nfacct lists them) has counted since it was made, in the rules of
// both families.
type Counter struct {
	// Name is [InvalidDropped] or [LocalhostNodePorts].
	Name string
	// Packets is how many packets, and Bytes how many bytes these had from their
	// network headers on.
	Packets, Bytes uint64
}

// Counters returns the counters that there are; none where [Config.NoCounters] is set,
// or where the kernel or iptables has no such thing, which was logged by [New]. It does
// not wait for an Apply. Once the backend is closed it returns [os.ErrClosed].
func (b *Backend) Counters() ([]Counter, error) {
	if b.closed.Load() {
		return nil, os.ErrClosed
	}
	var out []Counter
	for _, name := range b.counting {
		o, err := b.accounts.Get(name)
		switch {
		case errors.Is(err, unix.ENOENT): // deleted by somebody else
		case err != nil:
			return nil, fmt.Errorf("iptables: %w", err)
		default:
			out = append(out, Counter{o.Name, o.Packets, o.Bytes})
		}
	}
	return out, nil
}

// counters is which rules count.
type counters struct{ invalid, localhost bool }

var allCounters = counters{invalid: true, localhost: true}

// names returns the objects that it takes.
func (c counters) names() []string {
	var out []string
	if c.invalid {
		out = append(out, InvalidDropped)
	}
	if c.localhost {
		out = append(out, LocalhostNodePorts)
	}
	return out
}

// counted is the match that counts what got as far as it in a rule.
func counted(name string) string { return "-m nfacct --nfacct-name " + name }

// notCounted is what is logged then.
const notCounted = "iptables: invalid packets and connections to NodePorts at loopback addresses are not counted"

func (f *family) notCounted(reason error) { f.log.Info(notCounted, slog.Any("reason", reason)) }

// openAccounts returns what leads to the objects that rules count into, and makes
// those; nil if that cannot be done, or is not wanted.
func openAccounts(c Config, ns *netns.Namespace) (*nfacct.Conn, error) {
	if c.NoCounters {
		return nil, nil
	}
	a, err := nfacct.Dial(ns)
	if err != nil {
		return nil, err
	}
	localhost := c.LocalhostNodePorts && slices.Contains(c.Families, tracker.IPv4)
	if err := makeCounters(a, counters{invalid: true, localhost: localhost}); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// makeCounters makes the objects that are not there. A rule that names one of them
// would be refused, and everything with it.
func makeCounters(a *nfacct.Conn, c counters) error {
	for _, name := range c.names() {
		if _, err := a.Add(name); err != nil {
			return err
		}
	}
	return nil
}

// deleteCounters deletes the objects that no rule counts into any more: those of
// another family's rules, or of somebody else's, stay. On kernels that take their time
// to give up what deleted rules of nf_tables held (before Linux 6.10 they may) one may
// stay, too, which does no harm.
func deleteCounters(ns *netns.Namespace, log *slog.Logger) {
	a, err := nfacct.Dial(ns)
	if err != nil {
		log.Debug("iptables: counters are not looked for", slog.Any("reason", err))
		return
	}
	defer a.Close()
	for _, name := range allCounters.names() {
		if err := a.Delete(name); err != nil && !errors.Is(err, unix.ENOENT) {
			log.Debug("iptables: a counter stays", slog.String("name", name), slog.Any("reason", err))
		}
	}
}
