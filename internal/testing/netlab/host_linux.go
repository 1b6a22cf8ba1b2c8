package netlab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/sysctl"
)

// Host is one network namespace of a [Lab]. Its methods may be called from any
// goroutine, until the Lab is closed.
type Host struct {
	// Name is for messages.
	Name string
	// Around, if not nil, wraps each Do. It must call its argument once, on any thread, such
	// as one in a certain cgroup. Set it before several goroutines use the Host.
	Around func(func() error) error

	lab *Lab
	ns  *netns.Namespace
}

// setup changes the namespace's settings as [Lab.Host] describes.
func (h *Host) setup() error {
	return h.Do(func() error {
		if err := loopbackUp(); err != nil {
			return err
		}
		for path, value := range map[string]string{
			"net/ipv4/ip_forward":              "0",
			"net/ipv4/conf/all/rp_filter":      "0",
			"net/ipv4/conf/default/rp_filter":  "0",
			"net/ipv6/conf/all/forwarding":     "0",
			"net/ipv6/conf/all/accept_dad":     "0",
			"net/ipv6/conf/default/accept_dad": "0",
			"net/ipv6/conf/default/accept_ra":  "0",
			// By default the kernel limits how many refusals it sends (icmp(7)).
			"net/ipv4/icmp_ratemask": "0",
			"net/ipv6/icmp/ratemask": "0",
			// A router that sends a packet out of the interface at which it arrived reports this
			// to the sender, in IPv6 whatever its settings. The sender must not bypass it.
			"net/ipv6/conf/default/accept_redirects": "0",
		} {
			if err := sysctl.Set(path, value); err != nil {
				return err
			}
		}
		return nil
	})
}

// Do runs f inside the namespace, on an OS thread that no other goroutine uses until
// f returns. Sockets that f opens, and processes that it starts, stay in the
// namespace. Goroutines that f starts do not run inside. After the [Lab] is closed, Do
// returns an error that wraps [os.ErrClosed].
func (h *Host) Do(f func() error) error {
	do := func() error { return h.ns.Do(f) }
	var err error
	if h.Around != nil {
		err = h.Around(do)
	} else {
		err = do()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	return nil
}

// Namespace returns the namespace. It belongs to the Host.
func (h *Host) Namespace() *netns.Namespace { return h.ns }

// File returns an open file of the namespace. It belongs to the Host and is open
// until the [Lab] is closed.
func (h *Host) File() *os.File { return h.ns.File() }

// Path returns a file name of the namespace, which is valid for this process and its
// children.
func (h *Host) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), h.ns.File().Fd()) }

// Sysctl sets a kernel parameter of the namespace. The path is relative to /proc/sys, as
// in "net/ipv4/ip_forward".
func (h *Host) Sysctl(path, value string) error {
	return h.Do(func() error { return sysctl.Set(path, value) })
}

// Forward makes the host a router for both families. It is a step of the [Lab].
func (h *Host) Forward() {
	h.lab.Do(func() error {
		return errors.Join(h.Sysctl("net/ipv4/ip_forward", "1"), h.Sysctl("net/ipv6/conf/all/forwarding", "1"))
	})
}

// Addrs adds addresses with the lengths of their prefixes to an interface, as AddAddr does. It is a step
// of the [Lab].
func (h *Host) Addrs(ifname string, prefixes ...string) {
	for _, p := range prefixes {
		h.lab.Do(func() error { return h.AddAddr(ifname, netip.MustParsePrefix(p)) })
	}
}

// Routes adds routes to prefixes, as AddRoute does, through via or direct ones if via is "". It is a step
// of the [Lab].
func (h *Host) Routes(ifname, via string, to ...string) {
	var gw netip.Addr
	if via != "" {
		gw = netip.MustParseAddr(via)
	}
	for _, dst := range to {
		h.lab.Do(func() error { return h.AddRoute(netip.MustParsePrefix(dst), gw, ifname) })
	}
}

// Pod gives the host, which it links to a node, one address of each family and the node as its
// only neighbor: routes of both ends lead to single addresses. veth is the node's interface, and own
// and gateway hold the addresses of the host and of the node, by family. It is a step of the [Lab].
func (h *Host) Pod(node *Host, veth string, own, gateway [2]string) {
	h.lab.Link(node, veth, h, "eth0")
	for f, all := range []string{"0.0.0.0/0", "::/0"} {
		bits := []string{"/32", "/128"}[f]
		node.Addrs(veth, gateway[f]+bits)
		node.Routes(veth, "", own[f]+bits)
		h.Addrs("eth0", own[f]+bits)
		h.Routes("eth0", "", gateway[f]+bits)
		h.Routes("eth0", gateway[f], all)
	}
}

// AddAddr adds an address, with the route to its prefix, to an interface, which must be up.
// When it returns, the address can be used.
func (h *Host) AddAddr(ifname string, p netip.Prefix) error {
	return h.onLink(ifname, func(nl *netlink.Handle, link netlink.Link) error {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		err := nl.AddrAdd(link, a)
		if err == nil && p.Addr().Is6() && link.Attrs().Flags&net.FlagLoopback == 0 {
			err = h.waitSolicited(link.Attrs().Index, p.Addr())
		}
		if err == nil && p.Addr().Is6() {
			err = waitLocal(nl, p.Addr())
		}
		if err != nil {
			return fmt.Errorf("add address %s to %s: %w", p, ifname, err)
		}
		return nil
	})
}

// DeleteLoopback deletes a loopback address, so that a route may lead its packets to another host,
// whose answers from loopback addresses are accepted.
func (h *Host) DeleteLoopback(a netip.Addr) error {
	if err := h.Sysctl("net/ipv4/conf/all/route_localnet", "1"); err != nil {
		return err
	}
	return h.onLink("lo", func(nl *netlink.Handle, lo netlink.Link) error {
		bits := 8
		if a.Is6() {
			bits = 128
		}
		return nl.AddrDel(lo, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, bits))})
	})
}

// waitLocal waits until the kernel has a local route for an IPv6 address, which a kernel
// worker adds some time after the address (addrconf_dad_work of net/ipv6/addrconf.c). A
// socket that connects before that keeps the wrong route.
func waitLocal(nl *netlink.Handle, a netip.Addr) error {
	return wait(func() (bool, error) {
		routes, err := nl.RouteGet(a.AsSlice())
		if err != nil { // no route
			return false, nil
		}
		return len(routes) != 0 && routes[0].Type == unix.RTN_LOCAL, nil
	})
}

// AddRoute adds a route to dst, through via or directly if via is the zero Addr, or replaces
// the one that is there. With a via, ifname may be "".
func (h *Host) AddRoute(dst netip.Prefix, via netip.Addr, ifname string) error {
	r := &netlink.Route{Dst: ipNet(dst)}
	if via.IsValid() {
		r.Gw = via.AsSlice()
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	add := func(nl *netlink.Handle) error {
		if err := nl.RouteReplace(r); err != nil {
			return fmt.Errorf("add route %s via %s dev %q: %w", dst, via, ifname, err)
		}
		return nil
	}
	if ifname == "" {
		return h.netlink(add)
	}
	return h.onLink(ifname, func(nl *netlink.Handle, link netlink.Link) error {
		r.LinkIndex = link.Attrs().Index
		return add(nl)
	})
}

// AddLocal makes every address of a range local to the host. It is a step of the [Lab].
func (h *Host) AddLocal(r netip.Prefix) {
	h.lab.Do(func() error {
		return h.onLink("lo", func(nl *netlink.Handle, lo netlink.Link) error {
			err := nl.RouteAdd(&netlink.Route{
				Dst: ipNet(r), LinkIndex: lo.Attrs().Index,
				Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
			})
			if err != nil {
				return fmt.Errorf("make %s local: %w", r, err)
			}
			return nil
		})
	})
}

// AddBridge adds a bridge with the named interfaces as its ports, and brings it up.
func (h *Host) AddBridge(name string, ports ...string) error {
	err := h.netlink(func(nl *netlink.Handle) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		br := &netlink.Bridge{LinkAttrs: attrs}
		if err := nl.LinkAdd(br); err != nil {
			return err
		}
		for _, p := range ports {
			link, err := nl.LinkByName(p)
			if err != nil {
				return err
			}
			if err := nl.LinkSetMaster(link, br); err != nil {
				return err
			}
		}
		return nl.LinkSetUp(br)
	})
	if err == nil {
		err = h.waitUp(name)
	}
	if err != nil {
		return fmt.Errorf("netlab: bridge %s: %w", name, err)
	}
	return nil
}

// netlink runs f in the namespace with a handle that opens a socket for each request.
func (h *Host) netlink(f func(*netlink.Handle) error) error {
	if err := h.ns.Do(func() error { return f(&netlink.Handle{}) }); err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	return nil
}

func (h *Host) onLink(name string, f func(*netlink.Handle, netlink.Link) error) error {
	return h.netlink(func(nl *netlink.Handle) error {
		link, err := nl.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		return f(nl, link)
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
