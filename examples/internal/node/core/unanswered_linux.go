package core

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// seenReply is IPS_SEEN_REPLY of include/uapi/linux/netfilter/nf_conntrack_common.h.
const seenReply = 1 << 1

// endUnanswered waits for repairs of the rules, and deletes what outlives them: the kernel keeps for two
// minutes that the first packet of a connection to a Service was not translated, and treats the retransmissions
// alike. The cleaner does the same for UDP.
func (a *Agent) endUnanswered(ctx context.Context) error {
	if a.cleaner == nil || a.Config.Mode != config.ModeNFTables && a.Config.Mode != config.ModeIPTables {
		return nil
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.repaired:
		}
		for _, f := range a.families {
			n, err := a.deleteUnanswered(ctx, f)
			if n != 0 {
				a.Log.Info("deleted unanswered connections to Services from before the rules", "family", f, "connections", n)
			}
			if err != nil && ctx.Err() == nil {
				a.Log.Warn("cannot delete unanswered connections to Services from before the rules", "family", f, "error", err)
			}
		}
	}
}

// deleteUnanswered deletes the entries of connection tracking that have no translation and no answer, and whose
// destination is a Service with endpoints. It returns their number.
func (a *Agent) deleteUnanswered(ctx context.Context, family tracker.Family) (n int, err error) {
	conn, err := nfnl.Dial(a.netns)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	table, err := conntrack.OpenKernelTable(conntrack.Config{NetNS: a.netns})
	if err != nil {
		return 0, err
	}
	defer table.Close()
	var services *ruleset.Snapshot
	for protocol, name := range map[uint8]v1.Protocol{inet.TCP: v1.ProtocolTCP, inet.SCTP: v1.ProtocolSCTP} {
		var stale []conntrack.Flow
		dump := nfnl.Request{
			Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: nl.IPCTNL_MSG_CT_GET, Family: inet.AF(family), Dump: true,
			Attrs: tuple.AppendFilter(nil, protocol),
		}
		read := conn.Get(ctx, dump, func(attrs []byte) error {
			e := tuple.DecodeEntry(attrs)
			if e.Sent.Protocol != protocol || e.Status&seenReply != 0 || e.Sent.Dst != e.Reply.Src || e.Zone != 0 {
				return nil
			}
			if services == nil {
				services = a.Engine.Snapshot()
			}
			if s, _ := services.Lookup(e.Sent.Dst, name); s != nil && len(s.Selection.Reachable) != 0 {
				stale = append(stale, conntrack.Flow{Protocol: protocol, Src: e.Sent.Src, Dst: e.Sent.Dst, ReplySrc: e.Reply.Src, ReplyDst: e.Reply.Dst, ID: e.ID})
			}
			return nil
		})
		if read != nil {
			err = errors.Join(err, fmt.Errorf("cannot read connections: %w", read))
		}
		deleted, failed := table.Delete(ctx, stale)
		n, err = n+deleted, errors.Join(err, failed)
	}
	return n, err
}
