//go:build linux

package main

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// node is a host for an agent, with the hosts around it:
//
//	clients 192.0.2.10-13        far 192.168.60.2, all pods of the other nodes
//	        | eth1 192.0.2.1        | eth2 192.168.60.1    10.244.128.0/17
//	      +-------------- node --------------+
//	        | veth-pod1 ...         eth0 192.168.50.1, leads nowhere
//	   10.244.0.10-12, pods of this node
//
// All routes lead through the node.
type node struct {
	*netlab.Host
	lab    *netlab.Lab
	far    *netlab.Host
	pods   []*netlab.Host // of this node
	places []*place
	// path is a folder of programs that come before those of the machine, or "".
	path string
	// extra holds the addresses and links that faults have added.
	extra []string
}

// place is a source of connections: one address of each family in one namespace.
type place struct {
	name string
	host *netlab.Host
	// in is the interface by which the node receives the packets; empty for the node itself.
	in   string
	addr [2]netip.Addr
	// ports counts the source ports that were used.
	ports atomic.Uint32
}

const (
	nodeName     = "n1"
	nodeAddr4    = "192.168.50.1"
	nodeAddr6    = "fd00:50::1"
	otherAddr4   = "192.168.50.3" // sometimes an address of the node
	otherAddr6   = "fd00:50::3"
	clusterCIDRs = "10.244.0.0/16,fd00:244::/56"
	// Numbers of clients and of pods on this node.
	clients, localPods = 4, 3
	pods               = 12
)

// podPorts are the TCP and UDP ports at which every pod answers.
var podPorts = []uint16{8080, 8081}

// nodeAddresses holds the addresses that the node always has, by family.
var nodeAddresses = [2][]netip.Addr{
	{netip.MustParseAddr(nodeAddr4), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.168.60.1"), netip.MustParseAddr("10.244.0.1"), netip.MustParseAddr("127.0.0.1")},
	{netip.MustParseAddr(nodeAddr6), netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("fd00:60::1"), netip.MustParseAddr("fd00:244::1"), netip.MustParseAddr("::1")},
}

// local returns a source address and port that the place has not used recently. For a
// while the node's connection tracking sends packets from a used port to the same endpoint.
func (p *place) local(to netip.AddrPort) netip.AddrPort {
	const first, count = 10000, 19000 // below the first NodePort
	return netip.AddrPortFrom(p.addr[familyOf(to.Addr())], uint16(first+p.ports.Add(1)%count))
}

// familyOf returns 0 or 1, the index of an address's family.
func familyOf(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// number returns the n-th address after base.
func number(base string, n int) netip.Addr {
	b := netip.MustParseAddr(base).AsSlice()
	for i := len(b) - 1; n != 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// podAddr returns the address of a pod. Pods of this node have the lowest numbers.
func podAddr(pod, f int) netip.Addr {
	if pod < localPods {
		return number([]string{"10.244.0.10", "fd00:244::10"}[f], pod)
	}
	return number([]string{"10.244.128.10", "fd00:244:0:1::10"}[f], pod-localPods)
}

func newNode() (_ *node, err error) {
	b := netlab.New()
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	n := &node{Host: b.Host("node"), lab: b, far: b.Host("far")}
	client := b.Host("client")
	n.Forward()
	for _, which := range []string{"all", "default"} {
		b.Do(func() error { return n.Sysctl("net/ipv4/conf/"+which+"/send_redirects", "0") })
	}
	b.Link(n.Host, "eth0", n.Host, "peer0")
	n.Addrs("eth0", nodeAddr4+"/24", nodeAddr6+"/64")
	n.Routes("eth0", "192.168.50.2", "0.0.0.0/0")
	n.Routes("eth0", "fd00:50::2", "::/0")
	b.Link(n.Host, "eth1", client, "eth0")
	n.Addrs("eth1", "192.0.2.1/24", "2001:db8:1::1/64")
	for i := range clients {
		p := &place{name: fmt.Sprint("client-", i+1), host: client, in: "eth1", addr: [2]netip.Addr{number("192.0.2.10", i), number("2001:db8:1::10", i)}}
		client.Addrs("eth0", p.addr[0].String()+"/24", p.addr[1].String()+"/64")
		n.places = append(n.places, p)
	}
	b.Link(n.Host, "eth2", n.far, "eth0")
	n.Addrs("eth2", "192.168.60.1/24", "fd00:60::1/64")
	n.far.Addrs("eth0", "192.168.60.2/24", "fd00:60::2/64")
	for f, everything := range []string{"0.0.0.0/0", "::/0"} {
		client.Routes("eth0", nodeAddresses[f][1].String(), everything)
		n.far.Routes("eth0", nodeAddresses[f][2].String(), everything)
		n.Routes("eth2", []string{"192.168.60.2", "fd00:60::2"}[f], []string{"10.244.128.0/17", "fd00:244:0:1::/64"}[f])
	}
	for pod := localPods; pod < pods; pod++ {
		n.far.Addrs("lo", podAddr(pod, 0).String()+"/32", podAddr(pod, 1).String()+"/128")
	}
	n.places = append(n.places,
		&place{name: "far", host: n.far, in: "eth2", addr: [2]netip.Addr{netip.MustParseAddr("192.168.60.2"), netip.MustParseAddr("fd00:60::2")}},
		&place{name: "node", host: n.Host, addr: [2]netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}})
	for i := range localPods {
		h, veth := b.Host(fmt.Sprint("pod-", i+1)), fmt.Sprint("veth-pod", i+1)
		h.Pod(n.Host, veth, [2]string{podAddr(i, 0).String(), podAddr(i, 1).String()},
			[2]string{nodeAddresses[0][3].String(), nodeAddresses[1][3].String()})
		n.pods = append(n.pods, h)
		n.places = append(n.places, &place{name: h.Name, host: h, in: veth, addr: [2]netip.Addr{podAddr(i, 0), podAddr(i, 1)}})
	}
	return n, b.Err
}

// sh runs a shell command on the node and returns its standard output.
func (n *node) sh(text string) (string, error) {
	if n.path != "" {
		text = "export PATH=" + n.path + ":$PATH; " + text
	}
	return n.Output("sh", "-c", text)
}

// addresses returns the node's addresses of a family.
func (n *node) addresses(f int) []netip.Addr {
	out := slices.Clone(nodeAddresses[f])
	for _, x := range n.extra {
		if p, err := netip.ParsePrefix(x); err == nil && familyOf(p.Addr()) == f {
			out = append(out, p.Addr())
		}
	}
	return out
}

// toggle adds or removes an address with the length of its prefix, or a link.
func (n *node) toggle(what string) error {
	add := !slices.Contains(n.extra, what)
	if add {
		n.extra = append(n.extra, what)
	} else {
		n.extra = slices.DeleteFunc(n.extra, func(x string) bool { return x == what })
	}
	nl := &netlink.Handle{} // opens a socket for each request
	return n.Do(func() error {
		a, err := netlink.ParseAddr(what)
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: what, Flags: net.FlagUp}, PeerName: "peer-" + what}
		switch {
		case err != nil && add:
			return nl.LinkAdd(link)
		case err != nil:
			return nl.LinkDel(link)
		}
		// The kernel does not choose a deprecated address as the source of packets: the node's
		// own address stays the same.
		a.Flags, a.ValidLft = unix.IFA_F_NODAD, math.MaxUint32
		eth0, err := nl.LinkByName("eth0")
		switch {
		case err != nil:
			return err
		case add:
			return nl.AddrReplace(eth0, a)
		}
		return nl.AddrDel(eth0, a)
	})
}

// serve starts the servers of all pods, which greet each client.
func (n *node) serve() error {
	for pod := range pods {
		h := n.far
		if pod < localPods {
			h = n.pods[pod]
		}
		for f := range 2 {
			for _, port := range podPorts {
				h.Greet(netip.AddrPortFrom(podAddr(pod, f), port))
			}
		}
	}
	return n.lab.Err
}
