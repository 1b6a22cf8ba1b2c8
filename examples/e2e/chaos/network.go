//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// node is a host for an agent, with the hosts around it:
//
//	clients 192.0.2.10-13        far 192.168.60.2, all pods of the other nodes
//	        | eth1 192.0.2.1        | eth2 192.168.60.1    10.244.128.0/17
//	      +-------------- node --------------+
//	        | veth-pod-1 ...        eth0 192.168.50.1, leads nowhere
//	   10.244.0.10-12, pods of this node
//
// All routes lead through the node. Every pod greets the clients of its ports.
type node struct {
	*netlab.Host
	lab    *netlab.Lab
	places []*place
	// extra holds the addresses and links that faults have added.
	extra []string
}

// place is a source of connections: one address of each family in one namespace.
type place struct {
	name string
	host *netlab.Host
	// in is the interface by which the node receives the packets; empty for the node itself.
	in   string
	addr pair
	// ports counts the source ports that were used.
	ports atomic.Uint32
}

// own returns the place's address of the family of another.
func (p *place) own(like netip.Addr) netip.Addr { return p.addr[tracker.FamilyOf(like)] }

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

// nodeAddresses holds the addresses that the node always has.
var nodeAddresses = parse(netip.MustParseAddr, nodeAddr4, "192.0.2.1", "192.168.60.1", "10.244.0.1", "127.0.0.1",
	nodeAddr6, "2001:db8:1::1", "fd00:60::1", "fd00:244::1", "::1")

func parse[T any](f func(string) T, list ...string) (out []T) {
	for _, s := range list {
		out = append(out, f(s))
	}
	return out
}

// pair holds an address of each family.
type pair map[tracker.Family]netip.Addr

// number returns the n-th addresses after two.
func number(n int, base4, base6 string) pair {
	out := pair{tracker.IPv4: netip.MustParseAddr(base4), tracker.IPv6: netip.MustParseAddr(base6)}
	for f := range out {
		for range n {
			out[f] = out[f].Next()
		}
	}
	return out
}

// text returns the addresses with a suffix each.
func (p pair) text(suffix4, suffix6 string) [2]string {
	return [2]string{p[tracker.IPv4].String() + suffix4, p[tracker.IPv6].String() + suffix6}
}

// podAddr returns the addresses of a pod. Pods of this node have the lowest numbers.
func podAddr(pod int) pair {
	if pod < localPods {
		return number(pod, "10.244.0.10", "fd00:244::10")
	}
	return number(pod-localPods, "10.244.128.10", "fd00:244:0:1::10")
}

// newNode returns a node, whose lab the caller must close.
func newNode() *node {
	b := netlab.New()
	n := &node{Host: b.Host("node"), lab: b}
	client, far := b.Host("client"), b.Host("far")
	n.Forward()
	for _, which := range []string{"all", "default"} {
		b.Do(func() error { return n.Sysctl("net/ipv4/conf/"+which+"/send_redirects", "0") })
	}
	b.Link(n.Host, "eth0", n.Host, "peer0")
	b.Link(n.Host, "eth1", client, "eth0")
	b.Link(n.Host, "eth2", far, "eth0")
	n.Addrs("eth0", nodeAddr4+"/24", nodeAddr6+"/64")
	n.Addrs("eth1", "192.0.2.1/24", "2001:db8:1::1/64")
	n.Addrs("eth2", "192.168.60.1/24", "fd00:60::1/64")
	far.Addrs("eth0", "192.168.60.2/24", "fd00:60::2/64")
	n.places = []*place{
		{name: "far", host: far, in: "eth2", addr: number(0, "192.168.60.2", "fd00:60::2")},
		{name: "node", host: n.Host, addr: number(0, nodeAddr4, nodeAddr6)},
	}
	for i := range clients {
		p := &place{name: fmt.Sprint("client-", i+1), host: client, in: "eth1", addr: number(i, "192.0.2.10", "2001:db8:1::10")}
		ends := p.addr.text("/24", "/64")
		client.Addrs("eth0", ends[:]...)
		n.places = append(n.places, p)
	}
	n.Routes("eth0", "192.168.50.2", "0.0.0.0/0")
	n.Routes("eth0", "fd00:50::2", "::/0")
	n.Routes("eth2", "192.168.60.2", "10.244.128.0/17")
	n.Routes("eth2", "fd00:60::2", "fd00:244:0:1::/64")
	client.Routes("eth0", "192.0.2.1", "0.0.0.0/0")
	client.Routes("eth0", "2001:db8:1::1", "::/0")
	far.Routes("eth0", "192.168.60.1", "0.0.0.0/0")
	far.Routes("eth0", "fd00:60::1", "::/0")
	for pod := range pods {
		h, addr := far, podAddr(pod)
		if pod < localPods {
			p := &place{name: fmt.Sprint("pod-", pod+1), in: fmt.Sprint("veth-pod-", pod+1), addr: addr}
			p.host = b.Host(p.name)
			h = p.host
			h.Pod(n.Host, p.in, addr.text("", ""), [2]string{"10.244.0.1", "fd00:244::1"})
			n.places = append(n.places, p)
		} else {
			ends := addr.text("/32", "/128")
			far.Addrs("lo", ends[:]...)
		}
		for _, port := range podPorts {
			h.Greet(netip.AddrPortFrom(addr[tracker.IPv4], port))
			h.Greet(netip.AddrPortFrom(addr[tracker.IPv6], port))
		}
	}
	return n
}

// sh runs a shell command on the node and returns its standard output.
func (n *node) sh(text string) (string, error) { return n.Output("sh", "-c", text) }

// toggle adds or removes an address with the length of its prefix, or a link. It returns the addresses that the node
// has then.
func (n *node) toggle(what string) ([]netip.Addr, error) {
	add, remove := "link add "+what+" up type veth peer name peer-"+what, "link del "+what
	if strings.Contains(what, "/") {
		// The kernel does not choose a deprecated address as the source of packets: the node's
		// own address stays the same.
		add, remove = "addr replace "+what+" dev eth0 preferred_lft 0", "addr del "+what+" dev eth0"
	}
	command := add
	if i := slices.Index(n.extra, what); i >= 0 {
		command, n.extra = remove, slices.Delete(n.extra, i, i+1)
	} else {
		n.extra = append(n.extra, what)
	}
	_, err := n.Output("ip", strings.Fields(command)...) // the shell of a virtual machine has another ip
	out := slices.Clone(nodeAddresses)
	for _, x := range n.extra {
		if p, err := netip.ParsePrefix(x); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out, err
}
