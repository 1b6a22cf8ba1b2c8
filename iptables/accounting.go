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

// Counters returns what the rules have counted in the kernel's accounting objects
// (nfacct), which have kube-proxy's names: [InvalidDropped] and, with
// [Config.LocalhostNodePorts], [LocalhostNodePorts]. The objects outlast a restart, and
// [Cleanup] deletes them.
//
// There are no counters if [Config.NoCounters] is set, or if the kernel lacks
// nfnetlink_acct, or the kernel or iptables the match nfacct (xt_nfacct). [New] logs the
// latter, and everything else works. Counters does not wait for a concurrent Apply. It
// returns [os.ErrClosed] once the backend is closed.
func (b *Backend) Counters() ([]Counter, error) {
	if b.closed.Load() {
		return nil, os.ErrClosed
	}
	var out []Counter
	for _, name := range b.counting {
		o, err := b.accounts.Get(name)
		switch {
		case errors.Is(err, unix.ENOENT): // another program deleted it
		case err != nil:
			return nil, fmt.Errorf("iptables: %w", err)
		default:
			out = append(out, Counter{o.Name, o.Packets, o.Bytes})
		}
	}
	return out, nil
}

// countersFor returns the objects that rules can count into.
func countersFor(localhost bool) []string {
	if localhost {
		return []string{InvalidDropped, LocalhostNodePorts}
	}
	return []string{InvalidDropped}
}

// counted returns the match that counts the packets for which a rule's earlier matches
// hold.
func counted(name string) string { return "-m nfacct --nfacct-name " + name }

// notCounted is the log message where rules cannot count.
const notCounted = "iptables: invalid packets and connections to NodePorts at loopback addresses are not counted"

func (f *family) notCounted(reason error) { f.log.Info(notCounted, slog.Any("reason", reason)) }

// openAccounts creates the objects that rules count into and returns a connection to
// them, nil if c turns counting off.
func openAccounts(c Config, ns *netns.Namespace) (*nfacct.Conn, error) {
	if c.NoCounters {
		return nil, nil
	}
	a, err := nfacct.Dial(ns.File())
	if err != nil {
		return nil, err
	}
	localhost := c.LocalhostNodePorts && slices.Contains(c.Families, tracker.IPv4)
	if err := makeCounters(a, countersFor(localhost)); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// makeCounters creates the objects that do not exist. The kernel would refuse a rule that
// names a missing one, and the whole input with it.
func makeCounters(a *nfacct.Conn, names []string) error {
	for _, name := range names {
		if err := a.Add(name); err != nil {
			return err
		}
	}
	return nil
}

// deleteCounters deletes the objects that no rule counts into any more. Objects that
// rules of another family or of other programs use stay. Before Linux 6.10, nf_tables may
// release the objects of deleted rules with a delay. Such an object stays, too, which does
// no harm.
func deleteCounters(c Config) {
	a, err := nfacct.Dial(c.NetNS)
	if err != nil {
		c.Log.Debug("iptables: cannot open accounting objects", slog.Any("error", err))
		return
	}
	defer a.Close()
	for _, name := range countersFor(true) {
		if err := a.Delete(name); err != nil && !errors.Is(err, unix.ENOENT) {
			c.Log.Debug("iptables: cannot delete a counter", slog.String("name", name), slog.Any("error", err))
		}
	}
}
