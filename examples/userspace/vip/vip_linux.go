package vip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Protocol is the routing protocol number of the routes (rtm_protocol in
// include/uapi/linux/rtnetlink.h; the kernel does not interpret numbers from 4 on).
const Protocol netlink.RouteProtocol = 112

// Addresses adds addresses to one network namespace. It is not safe for concurrent use.
type Addresses struct {
	nl *netlink.Handle
	lo int // the index of the loopback interface
}

// New returns Addresses for the calling thread's network namespace. Any thread may use it.
// The caller must call Close, which keeps the held addresses.
func New() (*Addresses, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("vip: cannot open a netlink socket: %w", err)
	}
	lo, err := nl.LinkByName("lo")
	if err != nil {
		nl.Close()
		return nil, fmt.Errorf("vip: cannot find the loopback interface: %w", err)
	}
	return &Addresses{nl, lo.Attrs().Index}, nil
}

// Close closes the netlink socket. Held addresses stay. No other method may be called afterwards.
func (a *Addresses) Close() { a.nl.Close() }

// Own returns the addresses of all interfaces.
func (a *Addresses) Own() ([]netip.Addr, error) {
	var out []netip.Addr
	list, err := nfnl.Whole(context.Background(), netlink.ErrDumpInterrupted, func() ([]netlink.Addr, error) { return a.nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("vip: cannot list addresses: %w", err)
	}
	for i := range list {
		if x, ok := netip.AddrFromSlice(list[i].IP); ok {
			out = append(out, x.Unmap())
		}
	}
	return out, nil
}

// Permitted returns an error if the process may not add addresses: it lacks CAP_NET_ADMIN.
func (a *Addresses) Permitted() error {
	// Packets never go to 240.0.0.0/4 (RFC 1112, section 4), so no address in it is held.
	return a.Release(netip.AddrFrom4([4]byte{240, 0, 0, 1}))
}

// Local reports whether the node treats x as one of its own addresses: an interface has it, it
// is held, or it is in a range with a local route. It needs no privileges.
func (a *Addresses) Local(x netip.Addr) bool {
	if !x.IsValid() {
		return false
	}
	routes, err := a.nl.RouteGet(net.IP(x.Unmap().AsSlice()))
	return err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL
}

// Hold adds an address to the node. If an interface already has the address, or it is already
// held, Hold returns nil.
func (a *Addresses) Hold(x netip.Addr) error { return a.change("add", a.nl.RouteAdd, x, unix.EEXIST) }

// Release removes a held address. If the address is not held, Release returns nil. An
// interface's own address stays.
func (a *Addresses) Release(x netip.Addr) error {
	return a.change("delete", a.nl.RouteDel, x, unix.ESRCH)
}

// change adds or deletes the route of an address. It returns nil instead of the error done.
func (a *Addresses) change(verb string, change func(*netlink.Route) error, x netip.Addr, done error) error {
	x = x.Unmap()
	if !x.IsValid() || x.Zone() != "" || x.IsUnspecified() || x.IsMulticast() {
		return fmt.Errorf("vip: cannot hold %s: not a plain unicast address", x)
	}
	err := change(&netlink.Route{
		Dst:       &net.IPNet{IP: x.AsSlice(), Mask: net.CIDRMask(x.BitLen(), x.BitLen())},
		LinkIndex: a.lo,
		Table:     unix.RT_TABLE_LOCAL,
		Type:      unix.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  Protocol,
	})
	if err != nil && !errors.Is(err, done) {
		return fmt.Errorf("vip: cannot %s the local route of %s: %w", verb, x, err)
	}
	return nil
}

// Held returns the addresses that this process or an earlier process holds.
func (a *Addresses) Held() ([]netip.Addr, error) {
	filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: Protocol}
	const mask = netlink.RT_FILTER_TABLE | netlink.RT_FILTER_TYPE | netlink.RT_FILTER_PROTOCOL
	var out []netip.Addr
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := nfnl.Whole(context.Background(), netlink.ErrDumpInterrupted, func() ([]netlink.Route, error) { return a.nl.RouteListFiltered(family, filter, mask) })
		if err != nil {
			return nil, fmt.Errorf("vip: cannot list routes: %w", err)
		}
		for i := range list {
			if list[i].Dst == nil {
				continue
			}
			if x, ok := netip.AddrFromSlice(list[i].Dst.IP); ok {
				out = append(out, x.Unmap())
			}
		}
	}
	return out, nil
}
