package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// device is the dummy device that makes the Services' addresses local.
type device struct {
	route *netlink.Handle
	index int
	// events is a socket that receives changes of addresses.
	events *nl.NetlinkSocket
	buf    [1 << 15]byte
}

// dialDevice opens sockets in the calling thread's namespace.
func dialDevice() (*device, error) {
	route, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	d := &device{route: route}
	if err = route.SetSocketTimeout(netlinkTimeout); err != nil {
		err = fmt.Errorf("set timeout of rtnetlink socket: %w", err)
	} else if d.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR); err != nil {
		err = fmt.Errorf("subscribe to changes of addresses: %w", err)
	}
	if err != nil {
		route.Close()
		return nil, err
	}
	return d, nil
}

func (d *device) close() {
	d.route.Close()
	d.events.Close()
}

func (d *device) link() (netlink.Link, error) { return d.route.LinkByName(deviceName) }

// ensureDevice adds the device if it is missing. It stays down: its addresses are local nevertheless, and the kernel
// sends nothing through it.
func (d *device) ensureDevice() error {
	link, err := d.link()
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = deviceName
		err = d.route.LinkAdd(&netlink.Dummy{LinkAttrs: attrs})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add dummy device %s: %w", deviceName, err)
		}
		link, err = d.link()
	}
	if err != nil {
		return fmt.Errorf("find device %s: %w", deviceName, err)
	}
	if link.Type() != "dummy" {
		return fmt.Errorf("device %s is a %s, not a dummy device", deviceName, link.Type())
	}
	d.index = link.Attrs().Index
	return nil
}

func (d *device) findDevice() error {
	link, err := d.link()
	if err != nil {
		return fmt.Errorf("find device %s: %w", deviceName, err)
	}
	if link.Attrs().Index != d.index {
		return fmt.Errorf("device %s was replaced by another with the same name", deviceName)
	}
	return nil
}

// addresses calls bound with the device's addresses and own with the node's other
// addresses, except loopback addresses.
func (d *device) addresses(f tracker.Family, bound, own func(netip.Addr)) error {
	list, err := nfnl.Whole(context.Background(), netlink.ErrDumpInterrupted, func() ([]netlink.Addr, error) {
		return d.route.AddrList(nil, int(inet.AF(f)))
	})
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		addr = addr.Unmap()
		if tracker.FamilyOf(addr) != f {
			continue
		}
		switch {
		case a.LinkIndex == d.index:
			// The kernel gives the device an IPv6 link-local address, with a prefix of 64 bits.
			if bits, _ := a.Mask.Size(); bits == addr.BitLen() {
				bound(addr)
			}
		case !addr.IsLoopback():
			own(addr)
		}
	}
	return nil
}

func (d *device) netlinkAddr(a netip.Addr) *netlink.Addr {
	bits := a.BitLen()
	out := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}, LinkIndex: d.index}
	if a.Is6() {
		out.Flags = unix.IFA_F_NODAD
	}
	return out
}

func (d *device) itself() netlink.Link {
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: deviceName, Index: d.index}}
}

func (d *device) bind(a netip.Addr) error {
	err := d.route.AddrAdd(d.itself(), d.netlinkAddr(a))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		err = fmt.Errorf("add address %s to %s: %w", a, deviceName, err)
		if errors.Is(err, unix.ENODEV) {
			err = fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		return err
	}
	return nil
}

// waitLocal waits until the addresses are local. Until then, some time after they were added, the kernel forwards
// packets to IPv6 addresses (addrconf_dad_work of net/ipv6/addrconf.c).
func (d *device) waitLocal(ctx context.Context, addrs []netip.Addr) error {
	const timeout = 5 * time.Second
	deadline := time.Now().Add(timeout)
	for _, a := range addrs {
		for {
			routes, err := d.route.RouteGet(a.AsSlice())
			if err == nil && len(routes) != 0 && routes[0].Type == unix.RTN_LOCAL {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%w: address %s on %s is not local after %s (%v)", ruleset.ErrNeedFull, a, deviceName, timeout, err)
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Millisecond):
			}
		}
	}
	return nil
}

func (d *device) unbind(a netip.Addr) error {
	err := d.route.AddrDel(d.itself(), d.netlinkAddr(a))
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove address %s from %s: %w", a, deviceName, err)
	}
	return nil
}

func (d *device) removeDevice() error {
	link, err := d.link()
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil
	}
	if err == nil && link.Type() != "dummy" {
		return nil
	}
	if err == nil {
		err = d.route.LinkDel(link)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove device %s: %w", deviceName, err)
	}
	return nil
}

// addressesChanged reports whether an address of the node was added to or deleted from another
// device since the last call. It does not block.
func (d *device) addressesChanged() (changed bool, err error) {
	for {
		n, _, err := unix.Recvfrom(d.events.GetFd(), d.buf[:], unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return changed, nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			// The kernel has dropped events.
			changed = true
			continue
		case err != nil:
			return true, fmt.Errorf("read changes of addresses: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(d.buf[:n])
		changed = changed || err != nil || slices.ContainsFunc(messages, d.concerns)
	}
}

// concerns reports whether a message is about an address of another device that is not link-local: those come and go
// with every pod.
func (d *device) concerns(m syscall.NetlinkMessage) bool {
	if len(m.Data) < unix.SizeofIfAddrmsg {
		return false
	}
	a := nl.DeserializeIfAddrmsg(m.Data)
	return int(a.Index) != d.index && a.Scope < unix.RT_SCOPE_LINK
}
