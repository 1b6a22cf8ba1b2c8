package ipvs

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/tracker"
)

// States of connections that have ended (enum tcp_conntrack of
// include/uapi/linux/netfilter/nf_conntrack_tcp.h).
const (
	tcpTimeWait = 7
	tcpClose    = 8
)

func (s *system) connections(f tracker.Family, fn func(...netip.AddrPort)) error {
	r := nfnl.Request{
		Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: nl.IPCTNL_MSG_CT_GET, Family: inet.AF(f), Dump: true,
		Attrs: tuple.AppendFilter(nil, inet.TCP),
	}
	err := nfnl.Again(context.Background(), func() error {
		return s.ipsets.conn.Get(context.Background(), r, func(attrs []byte) error {
			var to, from tuple.Tuple
			state := uint8(tcpClose)
			for kind, value := range nfnl.Attributes(attrs) {
				switch kind {
				case nl.CTA_TUPLE_ORIG:
					to = tuple.Decode(value)
				case nl.CTA_TUPLE_REPLY:
					from = tuple.Decode(value)
				case nl.CTA_PROTOINFO:
					state = tcpState(value)
				}
			}
			if to.Protocol == inet.TCP && state != tcpTimeWait && state != tcpClose {
				fn(to.Dst, from.Src)
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("list tracked connections: %w", err)
	}
	return nil
}

// tcpState returns the state in the attributes of a CTA_PROTOINFO.
func tcpState(attrs []byte) (state uint8) {
	for kind, tcp := range nfnl.Attributes(attrs) {
		if kind != nl.CTA_PROTOINFO_TCP {
			continue
		}
		for kind, value := range nfnl.Attributes(tcp) {
			if kind == nl.CTA_PROTOINFO_TCP_STATE && len(value) == 1 {
				state = value[0]
			}
		}
	}
	return state
}
