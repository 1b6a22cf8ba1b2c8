//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// The network:
//
//	clients 192.0.2.10-13        far 198.51.100.2, all pods of the other nodes
//	        | eth0 192.0.2.1        | eth1 198.51.100.1    10.244.128.0/17
//	      +-------------- node --------------+
//	        | veth-pod1 ...                 | eth2 172.31.0.1
//	   10.244.1.11-13, pods of this node    control 172.31.0.2, with the API server
//
// All routes lead through the node. The whole range of far's pods is local to far, and its
// servers answer at every address of the range.
type network struct {
	lab                        *netlab.Lab
	node, client, far, control *netlab.Host
	pods                       []*netlab.Host
	places                     []*place
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

// isPod reports whether the place is a pod of this node.
func (p *place) isPod() bool { return strings.HasPrefix(p.in, "veth-pod") }

const (
	nodeName = "node-1"
	// Numbers of clients and of pods on this node.
	clients, localPods = 4, 3
	// farPods is the number of pods on other nodes, and nodePods that on each of them.
	farPods, nodePods = 1 << 15, 1 << 8
	// podPort is the TCP and UDP port at which every pod answers.
	podPort = 8080
	// controlAddr is the API server's address.
	controlAddr = "172.31.0.2"
)

// local returns a source address and port that the place has not used recently. For a
// while the node's connection tracking sends packets from a used port to the same endpoint.
func (p *place) local(f int) netip.AddrPort {
	const first, count = 10000, 22000 // below the kernel's ephemeral ports
	return netip.AddrPortFrom(p.addr[f], uint16(first+p.ports.Add(1)%count))
}

// familyOf returns 0 or 1, the index of an address's family.
func familyOf(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

var families = []tracker.Family{tracker.IPv4, tracker.IPv6}

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
		return number([]string{"10.244.1.11", "fd00:10:244:1::11"}[f], pod)
	}
	return number([]string{"10.244.128.0", "fd00:10:244:2::"}[f], pod-localPods)
}

// nodeOf returns the name of a pod's node.
func nodeOf(pod int) string {
	if pod < localPods {
		return nodeName
	}
	return fmt.Sprintf("node-%d", 2+(pod-localPods)/nodePods)
}

// nodeAddresses holds all addresses of the node, by family.
var nodeAddresses = [2][]netip.Addr{
	{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("172.31.0.1"), netip.MustParseAddr("127.0.0.1")},
	{netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:2::1"), netip.MustParseAddr("fd00:10:244:1::1"), netip.MustParseAddr("::1")},
}

// single returns the prefix that holds one address.
func single(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

// newNetwork builds the network and starts the servers.
func newNetwork() (_ *network, err error) {
	n := &network{}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	n.lab = netlab.New()
	b := &netlab.Builder{Lab: n.lab}
	n.node, n.client, n.far, n.control = b.Host(nodeName), b.Host("client"), b.Host("far"), b.Host("control")
	b.Do(func() error { return n.node.Forward() })
	for path, value := range map[string]string{"net/ipv4/conf/all/send_redirects": "0", "net/ipv4/conf/default/send_redirects": "0"} {
		b.Do(func() error { return n.node.Sysctl(path, value) })
	}
	b.Link(n.node, "eth0", n.client, "eth0")
	b.Addrs(n.node, "eth0", "192.0.2.1/24", "2001:db8:1::1/64")
	clientAddrs := func(i int) [2]netip.Addr {
		return [2]netip.Addr{number("192.0.2.10", i), number("2001:db8:1::10", i)}
	}
	for i := range clients {
		a := clientAddrs(i)
		b.Addrs(n.client, "eth0", a[0].String()+"/24", a[1].String()+"/64")
	}
	b.Routes(n.client, "eth0", "192.0.2.1", "0.0.0.0/0")
	b.Routes(n.client, "eth0", "2001:db8:1::1", "::/0")
	b.Routes(n.node, "eth0", "192.0.2.10", "0.0.0.0/0")
	b.Routes(n.node, "eth0", "2001:db8:1::10", "::/0")

	b.Link(n.node, "eth1", n.far, "eth0")
	b.Addrs(n.node, "eth1", "198.51.100.1/24", "2001:db8:2::1/64")
	b.Addrs(n.far, "eth0", "198.51.100.2/24", "2001:db8:2::2/64")
	b.Routes(n.far, "eth0", "198.51.100.1", "0.0.0.0/0")
	b.Routes(n.far, "eth0", "2001:db8:2::1", "::/0")
	b.Routes(n.node, "eth1", "198.51.100.2", "10.244.128.0/17")
	b.Routes(n.node, "eth1", "2001:db8:2::2", "fd00:10:244:2::/64")
	for _, r := range []string{"10.244.128.0/17", "fd00:10:244:2::/64"} {
		b.Do(func() error { return n.far.AddLocal(netip.MustParsePrefix(r)) })
	}

	b.Link(n.node, "eth2", n.control, "eth0")
	b.Addrs(n.node, "eth2", "172.31.0.1/24")
	b.Addrs(n.control, "eth0", controlAddr+"/24")

	for i := range localPods {
		h, veth := b.Host(fmt.Sprint("pod-", i+1)), fmt.Sprint("veth-pod", i+1)
		b.Link(n.node, veth, h, "eth0")
		b.Addrs(n.node, veth, "10.244.1.1/32", "fd00:10:244:1::1/128")
		for f, gw := range []string{"10.244.1.1", "fd00:10:244:1::1"} {
			own, gateway := podAddr(i, f), netip.MustParseAddr(gw)
			b.Routes(n.node, veth, "", single(own))
			b.Addrs(h, "eth0", single(own))
			b.Routes(h, "eth0", "", single(gateway))
			b.Routes(h, "eth0", gw, []string{"0.0.0.0/0", "::/0"}[f])
		}
		n.pods = append(n.pods, h)
	}
	if b.Err != nil {
		return nil, b.Err
	}
	for _, h := range append([]*netlab.Host{n.far}, n.pods...) {
		if err := serve(h); err != nil {
			return nil, err
		}
	}
	for i := range clients {
		n.places = append(n.places, &place{name: fmt.Sprint("client-", i+1), host: n.client, in: "eth0", addr: clientAddrs(i)})
	}
	for i, h := range n.pods {
		n.places = append(n.places, &place{name: h.Name, host: h, in: fmt.Sprint("veth-", "pod", i+1), addr: [2]netip.Addr{podAddr(i, 0), podAddr(i, 1)}})
	}
	n.places = append(n.places,
		&place{name: "far", host: n.far, in: "eth1", addr: [2]netip.Addr{netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8:2::2")}},
		&place{name: "node", host: n.node, addr: [2]netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}})
	return n, nil
}

func (n *network) close() {
	if n.lab != nil {
		n.lab.Close()
	}
}
