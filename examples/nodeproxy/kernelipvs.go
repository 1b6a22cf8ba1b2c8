package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"

	moby "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/tracker"
)

// lookupIPVS tells what IPVS does with a packet: the agent's, or kube-proxy's.
func lookupIPVS(_ context.Context, out io.Writer, q question) error {
	to := q.packet.To
	_, err := netlink.LinkByName(ipvs.DefaultDevice)
	if none := (netlink.LinkNotFoundError{}); errors.As(err, &none) {
		fmt.Fprintln(out, "kernel: mode ipvs has no rules in this network namespace")
		return nil
	}
	if err != nil {
		return fmt.Errorf("device %s: %w", ipvs.DefaultDevice, err)
	}
	h, err := moby.New("")
	if err != nil {
		return fmt.Errorf("IPVS: %w", err)
	}
	defer h.Close()
	family := tracker.FamilyOf(to.Addr())
	var mark uint32
	if q.near {
		if mark, err = nearMark(family, to, protocolNumber(q.packet.Protocol)); err != nil {
			return fmt.Errorf("ipset: %w", err)
		}
	}
	list, err := h.GetServices()
	if err != nil {
		return fmt.Errorf("virtual servers: %w", err)
	}
	i := slices.IndexFunc(list, func(s *moby.Service) bool {
		if mark != 0 {
			return s.FWMark == mark && s.AddressFamily == addressFamily(family)
		}
		return s.FWMark == 0 && s.Protocol == protocolNumber(q.packet.Protocol) && s.Port == to.Port() && addr(s.Address) == to.Addr()
	})
	if i < 0 {
		return q.compare(out, "no virtual server for it", "", nil, q.entry())
	}
	bound, err := isBound(to.Addr())
	if err != nil {
		return err
	}
	if !bound {
		fmt.Fprintf(out, "kernel: a virtual server for it, but %v is bound to no device\nkernel: DIFFERS from what should be\n", to.Addr())
		return errDiffers
	}
	reals, err := h.GetDestinations(list[i])
	if err != nil {
		return fmt.Errorf("real servers: %w", err)
	}
	var eps []netip.AddrPort
	for _, r := range reals {
		if r.Weight > 0 { // others keep the connections they have
			eps = append(eps, netip.AddrPortFrom(addr(r.Address), r.Port))
		}
	}
	slices.SortFunc(eps, netip.AddrPort.Compare)
	where := fmt.Sprintf("virtual server %s %v, scheduler %s", q.packet.Protocol, to, list[i].SchedName)
	if mark != 0 {
		where = fmt.Sprintf("virtual server of mark %d, for connections from near to %s %v, scheduler %s", mark, q.packet.Protocol, to, list[i].SchedName)
	}
	return q.compare(out, where, "", eps, q.entry())
}

func protocolNumber(p v1.Protocol) uint16 {
	switch p {
	case v1.ProtocolUDP:
		return unix.IPPROTO_UDP
	case v1.ProtocolSCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

func addressFamily(f tracker.Family) uint16 {
	if f == tracker.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// isBound reports whether an address is the node's, on whatever device.
func isBound(a netip.Addr) (bool, error) {
	list, err := whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return false, fmt.Errorf("addresses: %w", err)
	}
	return slices.ContainsFunc(list, func(n netlink.Addr) bool { return addr(n.IP) == a }), nil
}

// nearMark returns the packet mark that names another virtual server for connections
// from the node and its pods, 0 if there is none: it is kept with an element of an
// ipset (include/uapi/linux/netfilter/ipset/ip_set.h).
func nearMark(f tracker.Family, to netip.AddrPort, protocol uint16) (mark uint32, err error) {
	name := "KUBE-SHORT-CIRCUIT"
	if f == tracker.IPv6 {
		name = "KUBE-6-SHORT-CIRCUIT"
	}
	req := nl.NewNetlinkRequest(nl.IPSET_CMD_LIST|unix.NFNL_SUBSYS_IPSET<<8, nl.GetIpsetFlags(nl.IPSET_CMD_LIST))
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_NETLINK, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(name)))
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil // kube-proxy has no such set
	}
	if err != nil {
		return 0, err
	}
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		attributes(m[nl.SizeofNfgenmsg:], func(typ uint16, elements []byte) {
			if typ != nl.IPSET_ATTR_ADT {
				return
			}
			attributes(elements, func(_ uint16, element []byte) {
				var e setElement
				attributes(element, e.take)
				if e.at == to && e.protocol == protocol {
					mark = e.mark
				}
			})
		})
	}
	return mark, nil
}

// setElement is an element of an ipset of addresses, protocols and ports with marks.
type setElement struct {
	at       netip.AddrPort
	protocol uint16
	mark     uint32
}

// take reads one attribute.
func (e *setElement) take(typ uint16, data []byte) {
	switch {
	case typ == nl.IPSET_ATTR_IP:
		attributes(data, func(_ uint16, ip []byte) { e.at = netip.AddrPortFrom(addr(net.IP(ip)), e.at.Port()) })
	case typ == nl.IPSET_ATTR_PORT && len(data) == 2:
		e.at = netip.AddrPortFrom(e.at.Addr(), binary.BigEndian.Uint16(data))
	case typ == nl.IPSET_ATTR_PROTO && len(data) == 1:
		e.protocol = uint16(data[0])
	case typ == nl.IPSET_ATTR_SKBMARK && len(data) == 8: // value and mask
		e.mark = binary.BigEndian.Uint32(data)
	}
}

// attributes calls f with each netlink attribute (include/uapi/linux/netlink.h) of b.
func attributes(b []byte, f func(typ uint16, data []byte)) {
	for len(b) >= unix.SizeofNlAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofNlAttr || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}
