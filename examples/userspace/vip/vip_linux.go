package vip

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Protocol is the routing protocol number of the routes (rtm_protocol of
// include/uapi/linux/rtnetlink.h, which leaves numbers from 5 on to programs).
const Protocol netlink.RouteProtocol = 112

// ErrClosed is returned after [Addresses.Close].
var ErrClosed = errors.New("vip: closed")

// Addresses makes addresses the own ones of one network namespace. It must not be
// used by several goroutines at once.
type Addresses struct {
	nl *netlink.Handle // nil: closed
	lo int             // the index of the loopback interface
}

// New returns the Addresses of the calling thread's network namespace, which may
// be used from any thread. Close it when done; what is held then stays.
func New() (*Addresses, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("vip: netlink: %w", err)
	}
	lo, err := nl.LinkByName("lo")
	if err != nil {
		nl.Close()
		return nil, fmt.Errorf("vip: loopback interface: %w", err)
	}
	return &Addresses{nl, lo.Attrs().Index}, nil
}

// Close gives up the netlink socket. What is held stays so.
func (a *Addresses) Close() error {
	if a.nl != nil {
		a.nl.Close()
		a.nl = nil
	}
	return nil
}

// Own returns the addresses of all interfaces.
func (a *Addresses) Own() ([]netip.Addr, error) {
	if a.nl == nil {
		return nil, ErrClosed
	}
	var out []netip.Addr
	list, err := again(func() ([]netlink.Addr, error) { return a.nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("vip: addresses: %w", err)
	}
	for i := range list {
		if x, ok := netip.AddrFromSlice(list[i].IP); ok {
			out = append(out, x.Unmap())
		}
	}
	return out, nil
}

// again reads a list once more if it changed while it was read, a few times.
func again[T any](list func() ([]T, error)) (out []T, err error) {
	for range 10 {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// Hold makes an address the node's own. That an interface has it already, or that
// it is held, is no error.
func (a *Addresses) Hold(x netip.Addr) error {
	if a.nl == nil {
		return ErrClosed
	}
	r, err := a.route(x)
	if err != nil {
		return err
	}
	if err := a.nl.RouteAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("vip: add a local route for %s: %w", x, err)
	}
	return nil
}

// Release takes back a Hold. That there was none is no error; an interface's own
// address stays.
func (a *Addresses) Release(x netip.Addr) error {
	if a.nl == nil {
		return ErrClosed
	}
	r, err := a.route(x)
	if err != nil {
		return err
	}
	if err := a.nl.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("vip: delete the local route of %s: %w", x, err)
	}
	return nil
}

// Held returns the addresses that are held, by this process or an earlier one.
func (a *Addresses) Held() ([]netip.Addr, error) {
	if a.nl == nil {
		return nil, ErrClosed
	}
	filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: Protocol}
	const mask = netlink.RT_FILTER_TABLE | netlink.RT_FILTER_TYPE | netlink.RT_FILTER_PROTOCOL
	var out []netip.Addr
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := again(func() ([]netlink.Route, error) { return a.nl.RouteListFiltered(family, filter, mask) })
		if err != nil {
			return nil, fmt.Errorf("vip: routes: %w", err)
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

func (a *Addresses) route(x netip.Addr) (*netlink.Route, error) {
	x = x.Unmap()
	if !x.IsValid() || x.Zone() != "" || x.IsUnspecified() || x.IsMulticast() {
		return nil, fmt.Errorf("vip: %s cannot be held", x)
	}
	return &netlink.Route{
		Dst:       &net.IPNet{IP: x.AsSlice(), Mask: net.CIDRMask(x.BitLen(), x.BitLen())},
		LinkIndex: a.lo,
		Table:     unix.RT_TABLE_LOCAL,
		Type:      unix.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  Protocol,
	}, nil
}
