package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

type kernel struct {
	conn  *nfnl.Conn
	zones []uint16 // the zones that Dump reports; empty for zone 0 alone
	route *netlink.Handle
}

// OpenKernelTable opens the kernel's table in cfg.NetNS. Dump reports the flows of cfg.Zones. The other fields have
// no effect. It needs the same privileges as [New] and returns the same errors.
func OpenKernelTable(cfg Config) (*KernelTable, error) {
	n, err := netns.Open(cfg.NetNS)
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	defer n.Close()
	k := &KernelTable{kernel{zones: slices.Clone(cfg.Zones)}}
	err = n.Do(func() (err error) {
		if k.conn, err = nfnl.Dial(nil); err != nil {
			return err
		}
		if k.route, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("open route socket: %w", err)
		}
		return nil
	})
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT):
		err = unsupported("nfnetlink (CONFIG_NETFILTER_NETLINK)", err)
	case err != nil:
		err = fmt.Errorf("conntrack: %w", err)
	default:
		err = k.probe()
	}
	if err != nil {
		k.Close()
		return nil, err
	}
	return k, nil
}

func unsupported(feature string, err error) error {
	return &dataplane.UnsupportedError{Backend: "conntrack", Feature: feature, Err: err}
}

// probe requests the statistics, to find out whether the kernel has the subsystem.
func (k *KernelTable) probe() error {
	err := k.conn.Get(context.Background(), nfnl.Request{Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: ctGetStats}, func([]byte) error { return nil })
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		// nfnetlink returns these errors if a subsystem is missing.
		return unsupported("conntrack over netlink (CONFIG_NF_CT_NETLINK)", err)
	case err != nil:
		return fmt.Errorf("conntrack: cannot read statistics: %w", err)
	}
	return nil
}

// Close closes the table's sockets. The table must not be used afterwards.
func (k *KernelTable) Close() error {
	if k.route != nil {
		k.route.Close()
	}
	if k.conn != nil {
		return k.conn.Close()
	}
	return nil
}

// Dump implements [FlowTable]. It reports UDP flows in the configured zones. If flows may be missing, the error wraps
// [ErrIncomplete]. Kernels from 5.8 on leave out other protocols (CTA_FILTER), and from 6.8 on other zones if a
// single zone other than 0 is configured (CTA_ZONE).
func (k *KernelTable) Dump(ctx context.Context, family tracker.Family, f func(*Flow)) error {
	var flow Flow
	err := k.conn.Get(ctx, dumpRequest(family, k.zones), func(attrs []byte) error {
		if err := decodeFlow(attrs, &flow); err != nil {
			return err
		}
		// Some kernels do not filter.
		if flow.Protocol == inet.UDP && inZones(k.zones, flow.Zone) {
			f(&flow)
		}
		return nil
	})
	return incomplete("dump", err)
}

func incomplete(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, nfnl.ErrInterrupted), errors.Is(err, unix.ENOBUFS):
		return fmt.Errorf("%s: %w: %w", what, ErrIncomplete, err)
	case errors.Is(err, nfnl.ErrMalformed):
		return fmt.Errorf("%s: %w: %w", what, ErrMalformed, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Delete implements [FlowTable]. If the kernel refuses to delete a flow, Delete continues with the others. The error
// names the first such flow.
func (k *KernelTable) Delete(ctx context.Context, flows []Flow) (int, error) {
	deleted := 0
	var refused error
	var req []byte
	for len(flows) > 0 {
		batch := flows[:min(len(flows), deleteBatch)]
		flows = flows[len(batch):]
		req = req[:0]
		first := k.conn.Sequence(len(batch))
		for i := range batch {
			req = appendDelete(req, first+uint32(i), &batch[i])
		}
		err := k.conn.Exchange(ctx, req, first, len(batch), func(m nfnl.Message) error {
			switch err := m.Err(); {
			case errors.Is(err, nfnl.ErrMalformed):
				return err
			case err == nil:
				deleted++
			case errors.Is(err, unix.ENOENT): // it has expired
			case refused == nil:
				f := &batch[m.Seq-first]
				refused = fmt.Errorf("cannot delete flow from %v to %v: %w", f.Src, f.Dst, err)
			}
			return nil
		})
		if err != nil {
			return deleted, incomplete("delete", err)
		}
	}
	return deleted, refused
}

// LocalAddrs implements [FlowTable]: it returns the addresses of all interfaces, or an
// error if the kernel does not list them.
func (k *KernelTable) LocalAddrs(ctx context.Context, family tracker.Family) ([]netip.Addr, error) {
	list, err := nfnl.Whole(ctx, netlink.ErrDumpInterrupted, func() ([]netlink.Addr, error) {
		return k.route.AddrList(nil, int(inet.AF(family)))
	})
	if err != nil {
		return nil, fmt.Errorf("cannot list addresses: %w", err)
	}
	out := make([]netip.Addr, 0, len(list))
	for i := range list {
		if list[i].IPNet == nil {
			continue
		}
		if a, ok := netip.AddrFromSlice(list[i].IP); ok {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

// ctGetStats is IPCTNL_MSG_CT_GET_STATS (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const ctGetStats = 5

// dumpRequest returns the request for the UDP flows of a family in some zones. It does not name zone 0, because a
// kernel without CONFIG_NF_CONNTRACK_ZONES refuses the attribute.
func dumpRequest(f tracker.Family, zones []uint16) nfnl.Request {
	b := tuple.AppendFilter(nil, inet.UDP)
	if len(zones) == 1 && zones[0] != 0 {
		b = nfnl.AppendUint16(b, nl.CTA_ZONE, zones[0])
	}
	return nfnl.Request{Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: nl.IPCTNL_MSG_CT_GET, Family: inet.AF(f), Dump: true, Attrs: b}
}

// appendDelete appends a request to delete the entry of f and no other.
func appendDelete(b []byte, seq uint32, f *Flow) []byte {
	start := len(b)
	b = nfnl.Begin(b, unix.NFNL_SUBSYS_CTNETLINK, nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, seq, inet.AF(tracker.FamilyOf(f.Dst.Addr())))
	b = tuple.Append(b, nl.CTA_TUPLE_ORIG, f.Protocol, f.Src, f.Dst)
	if f.Zone != 0 && !f.ReplyZone { // the zone of the original direction
		b = nfnl.AppendUint16(b, nl.CTA_ZONE, f.Zone)
	}
	// The ID keeps the kernel from deleting a newer entry with the same addresses.
	b = nfnl.AppendUint32(b, nl.CTA_ID, f.ID)
	nfnl.End(b, start)
	return b
}

// decodeFlow reads the attributes of an IPCTNL_MSG_CT_NEW message and sets all fields of f.
func decodeFlow(attrs []byte, f *Flow) error {
	*f = Flow{}
	for kind, value := range nfnl.Attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			t := tuple.Decode(value)
			f.Src, f.Dst, f.Protocol = t.Src, t.Dst, t.Protocol
			if t.HasZone {
				f.Zone, f.ReplyZone = t.Zone, false
			}
		case nl.CTA_TUPLE_REPLY:
			t := tuple.Decode(value)
			f.ReplySrc, f.ReplyDst = t.Src, t.Dst
			if t.HasZone {
				f.Zone, f.ReplyZone = t.Zone, true
			}
		case nl.CTA_ID:
			f.ID = nfnl.Uint32(value)
		case nl.CTA_ZONE:
			f.Zone, f.ReplyZone = nfnl.Uint16(value), false
		}
	}
	family := tracker.FamilyOf(f.Src.Addr())
	for _, a := range [...]netip.Addr{f.Src.Addr(), f.Dst.Addr(), f.ReplySrc.Addr(), f.ReplyDst.Addr()} {
		if family == 0 || a.BitLen() != family.Bits() {
			return fmt.Errorf("%w: flow without four addresses of one family", ErrMalformed)
		}
	}
	return nil
}
