package iptables

import (
	"fmt"
	"log/slog"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// The names of the kernel's accounting objects that rules count into, which are
// kube-proxy's.
const (
	// InvalidDropped counts packets that are dropped because connection tracking considers them invalid.
	InvalidDropped = "ct_state_invalid_dropped_pkts"
	// LocalhostNodePorts counts first packets of connections to NodePorts at IPv4
	// loopback addresses ([Config.LocalhostNodePorts]).
	LocalhostNodePorts = "localhost_nps_accepted_pkts"
)

func countersFor(localhost bool) []string {
	if localhost {
		return []string{InvalidDropped, LocalhostNodePorts}
	}
	return []string{InvalidDropped}
}

// counted returns the match that counts the packets for which a rule's earlier matches
// hold.
func counted(name string) string { return "-m nfacct --nfacct-name " + name }

// Counters returns the numbers of packets in the kernel's accounting objects (linux/netfilter/nfnetlink_acct.h),
// under kube-proxy's names: [InvalidDropped] and, with [Config.LocalhostNodePorts], [LocalhostNodePorts]. They count
// for both families, and outlast a restart. [Cleanup] deletes them.
//
// There are no counters if the kernel lacks nfnetlink_acct, or the kernel or iptables the match nfacct (xt_nfacct).
// [New] logs that. Counters does not wait for a concurrent Apply. It returns an error that wraps [os.ErrClosed] once
// the backend is closed.
func (b *Backend) Counters() (map[string]uint64, error) {
	if b.closed.Load() {
		return nil, errClosed
	}
	out := make(map[string]uint64, len(b.counting))
	for _, name := range b.counting {
		packets, ok, err := b.accounts.Packets(name)
		if err != nil {
			return nil, fmt.Errorf("iptables: %w", err)
		}
		if ok { // another program may have deleted it
			out[name] = packets
		}
	}
	return out, nil
}

// notCounted is the log message where rules cannot count.
const notCounted = "iptables: invalid packets and connections to NodePorts at loopback addresses are not counted"

func (f *family) notCounted(reason error) { f.log.Info(notCounted, slog.Any("reason", reason)) }

// openAccounts creates the objects that rules count into and returns a connection to
// them, nil if c turns counting off.
func openAccounts(c Config, k kernel) (accounts, error) {
	if c.uncounted {
		return nil, nil
	}
	a, err := k.Accounts()
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

// makeCounters creates the objects that do not exist: the kernel would refuse an input with a rule that names a
// missing one.
func makeCounters(a accounts, names []string) error {
	for _, name := range names {
		if err := a.Add(name); err != nil {
			return err
		}
	}
	return nil
}

// deleteCounters deletes the objects that no rule counts into any more. Before Linux 6.10, nf_tables may release the
// objects of deleted rules with a delay. Such an object stays, which does no harm.
func deleteCounters(c Config, k kernel) {
	a, err := k.Accounts()
	if err != nil {
		c.Log.Debug("iptables: cannot open accounting objects", slog.Any("error", err))
		return
	}
	defer a.Close()
	for _, name := range countersFor(true) {
		if err := a.Delete(name); err != nil {
			c.Log.Debug("iptables: cannot delete a counter", slog.String("name", name), slog.Any("error", err))
		}
	}
}
