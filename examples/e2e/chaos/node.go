//go:build linux

package main

import (
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// node is a host for an agent.
type node struct {
	*netlab.Host
	lab *netlab.Lab
	// extra holds the addresses and links that faults have added.
	extra []string
}

// newNode returns a node with the same addresses and interfaces as another one, if that is not
// nil.
func newNode(like *node) (_ *node, err error) {
	n := &node{lab: netlab.New()}
	defer func() {
		if err != nil {
			n.lab.Close()
		}
	}()
	b := &netlab.Builder{Lab: n.lab}
	n.Host = b.Host("node")
	b.Link(n.Host, "eth0", n.Host, "peer0")
	b.Addrs(n.Host, "eth0", nodeAddr4+"/24", nodeAddr6+"/64")
	b.Routes(n.Host, "eth0", "192.168.50.2", "0.0.0.0/0")
	b.Routes(n.Host, "eth0", "fd00:50::2", "::/0")
	b.Do(n.Host.Forward)
	if like != nil {
		for _, x := range like.extra {
			b.Do(func() error { return n.toggle(x) })
		}
	}
	return n, b.Err
}

// toggle adds or removes an address with the length of its prefix, or a link.
func (n *node) toggle(what string) error {
	add := !slices.Contains(n.extra, what)
	if add {
		n.extra = append(n.extra, what)
	} else {
		n.extra = slices.DeleteFunc(n.extra, func(x string) bool { return x == what })
	}
	return n.Do(func() error {
		nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer nl.Close()
		p, err := netip.ParsePrefix(what)
		if err != nil {
			return toggleLink(nl, what, add)
		}
		link, err := nl.LinkByName("eth0")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(p.String())
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if add {
			return nl.AddrReplace(link, a)
		}
		return nl.AddrDel(link, a)
	})
}

// toggleLink adds or removes a pair of virtual Ethernet links.
func toggleLink(nl *netlink.Handle, name string, add bool) error {
	if add {
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: net.FlagUp}, PeerName: "peer-" + name}
		return nl.LinkAdd(link)
	}
	link, err := nl.LinkByName(name)
	if err != nil {
		return err
	}
	return nl.LinkDel(link)
}

func (n *node) close() { n.lab.Close() }
