package objects

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// OpenAddresses returns a function that reads the node's own addresses, one that reads the addresses to
// which its network leads, and one that closes them. The calling thread must be in the node's network
// namespace.
func OpenAddresses() (own func() ([]netip.Addr, error), ranges func() (Ranges, error), stop func(), err error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	return func() ([]netip.Addr, error) { return ownAddresses(nl) }, func() (Ranges, error) { return readRanges(nl) }, nl.Close, nil
}

// network reads the addresses of a family and its main routing table.
func network(nl *netlink.Handle, family int) (addrs []netlink.Addr, routes []netlink.Route, err error) {
	ctx := context.Background()
	addrs, err = nfnl.Whole(ctx, netlink.ErrDumpInterrupted, func() ([]netlink.Addr, error) { return nl.AddrList(nil, family) })
	if err != nil {
		return nil, nil, fmt.Errorf("cannot list the addresses: %w", err)
	}
	routes, err = nfnl.Whole(ctx, netlink.ErrDumpInterrupted, func() ([]netlink.Route, error) {
		return nl.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, nil, fmt.Errorf("cannot read the routing table: %w", err)
	}
	return addrs, routes, nil
}

// readRanges returns the addresses to which the node's network leads. Networks of one address are left
// out: the address is the node's own.
func readRanges(nl *netlink.Handle) (out Ranges, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		addrs, routes, err := network(nl, family)
		if err != nil {
			return Ranges{}, err
		}
		for _, a := range addrs {
			if p := prefix(a.IPNet); !p.IsSingleIP() {
				out.Connected = append(out.Connected, p)
			}
		}
		for _, r := range routes {
			if p := prefix(r.Dst); p.Bits() > 0 {
				out.Routed = append(out.Routed, p)
			}
		}
	}
	return out, nil
}

func prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(Addr(n.IP), bits).Masked()
}

// ownAddresses returns the node's addresses according to its routing table. In each family
// that is the source address of the default route. Without a default route it is every
// address that is neither loopback nor link-local.
func ownAddresses(nl *netlink.Handle) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		addrs, routes, err := network(nl, family)
		if err != nil {
			return nil, err
		}
		addrs = slices.DeleteFunc(addrs, func(a netlink.Addr) bool {
			return a.Scope != int(netlink.SCOPE_UNIVERSE) || a.IP.IsLoopback() ||
				a.Flags&(unix.IFA_F_TEMPORARY|unix.IFA_F_DEPRECATED) != 0
		})
		if own := defaultSource(routes, addrs); own != nil {
			out = append(out, Addr(own))
			continue
		}
		// Sorted, because a change of the kernel's order must not count as a change.
		slices.SortFunc(addrs, func(a, b netlink.Addr) int { return Addr(a.IP).Compare(Addr(b.IP)) })
		for _, a := range addrs {
			out = append(out, Addr(a.IP))
		}
	}
	return out, nil
}

// defaultSource returns the source address of the default route, or nil without a default
// route. It is the address that the route names, or else an address of its interface,
// preferably in the network of the gateway.
func defaultSource(routes []netlink.Route, addrs []netlink.Addr) net.IP {
	routes = slices.DeleteFunc(routes, func(r netlink.Route) bool { return prefix(r.Dst).Bits() > 0 })
	slices.SortStableFunc(routes, func(a, b netlink.Route) int { return cmp.Compare(a.Priority, b.Priority) })
	for _, r := range routes {
		if r.Src != nil {
			return r.Src
		}
		link, gw := r.LinkIndex, r.Gw
		if len(r.MultiPath) != 0 {
			link, gw = r.MultiPath[0].LinkIndex, r.MultiPath[0].Gw
		}
		var found net.IP
		for _, a := range addrs {
			if a.LinkIndex == link && (found == nil || gw != nil && a.Contains(gw)) {
				found = a.IP
			}
		}
		if found != nil {
			return found
		}
	}
	return nil
}

func Addr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
