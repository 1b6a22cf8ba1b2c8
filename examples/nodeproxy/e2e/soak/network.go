//go:build linux

package main

import (
	"fmt"
	"net/netip"
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
	if n.lab, err = netlab.New(); err != nil {
		return nil, err
	}
	b := &builder{lab: n.lab}
	n.node, n.client, n.far, n.control = b.host(nodeName), b.host("client"), b.host("far"), b.host("control")
	b.do(func() error { return n.node.Forward() })
	for path, value := range map[string]string{"net/ipv4/conf/all/send_redirects": "0", "net/ipv4/conf/default/send_redirects": "0"} {
		b.do(func() error { return n.node.Sysctl(path, value) })
	}
	b.link(n.node, "eth0", n.client, "eth0")
	b.addrs(n.node, "eth0", "192.0.2.1/24", "2001:db8:1::1/64")
	clientAddrs := func(i int) [2]netip.Addr {
		return [2]netip.Addr{number("192.0.2.10", i), number("2001:db8:1::10", i)}
	}
	for i := range clients {
		a := clientAddrs(i)
		b.addrs(n.client, "eth0", a[0].String()+"/24", a[1].String()+"/64")
	}
	b.route(n.client, "eth0", "0.0.0.0/0", "192.0.2.1")
	b.route(n.client, "eth0", "::/0", "2001:db8:1::1")
	b.route(n.node, "eth0", "0.0.0.0/0", "192.0.2.10")
	b.route(n.node, "eth0", "::/0", "2001:db8:1::10")

	b.link(n.node, "eth1", n.far, "eth0")
	b.addrs(n.node, "eth1", "198.51.100.1/24", "2001:db8:2::1/64")
	b.addrs(n.far, "eth0", "198.51.100.2/24", "2001:db8:2::2/64")
	b.route(n.far, "eth0", "0.0.0.0/0", "198.51.100.1")
	b.route(n.far, "eth0", "::/0", "2001:db8:2::1")
	b.route(n.node, "eth1", "10.244.128.0/17", "198.51.100.2")
	b.route(n.node, "eth1", "fd00:10:244:2::/64", "2001:db8:2::2")
	for _, r := range []string{"10.244.128.0/17", "fd00:10:244:2::/64"} {
		b.do(func() error { return n.far.AddLocal(netip.MustParsePrefix(r)) })
	}

	b.link(n.node, "eth2", n.control, "eth0")
	b.addrs(n.node, "eth2", "172.31.0.1/24")
	b.addrs(n.control, "eth0", controlAddr+"/24")

	for i := range localPods {
		h, veth := b.host(fmt.Sprint("pod-", i+1)), fmt.Sprint("veth-pod", i+1)
		b.link(n.node, veth, h, "eth0")
		b.addrs(n.node, veth, "10.244.1.1/32", "fd00:10:244:1::1/128")
		for f, gw := range []string{"10.244.1.1", "fd00:10:244:1::1"} {
			own, gateway := podAddr(i, f), netip.MustParseAddr(gw)
			b.route(n.node, veth, single(own), "")
			b.addrs(h, "eth0", single(own))
			b.route(h, "eth0", single(gateway), "")
			b.route(h, "eth0", []string{"0.0.0.0/0", "::/0"}[f], gw)
		}
		n.pods = append(n.pods, h)
	}
	if b.err != nil {
		return nil, b.err
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

// builder runs steps until one fails, and holds its error.
type builder struct {
	lab *netlab.Lab
	err error
}

func (b *builder) do(f func() error) {
	if b.err == nil {
		b.err = f()
	}
}

// host makes a host without a rate limit on ICMP errors, because every refusal counts, and
// without redirects, because all packets must pass the node.
func (b *builder) host(name string) (h *netlab.Host) {
	b.do(func() (err error) {
		if h, err = b.lab.Host(name); err != nil {
			return err
		}
		for path, value := range map[string]string{
			"net/ipv4/icmp_ratemask": "0", "net/ipv6/icmp/ratemask": "0", "net/ipv6/conf/default/accept_redirects": "0",
		} {
			if err := h.Sysctl(path, value); err != nil {
				return err
			}
		}
		return nil
	})
	return h
}

func (b *builder) link(x *netlab.Host, ifx string, y *netlab.Host, ify string) {
	b.do(func() error { return b.lab.Link(x, ifx, y, ify) })
}

func (b *builder) addrs(h *netlab.Host, ifname string, prefixes ...string) {
	for _, p := range prefixes {
		b.do(func() error { return h.AddAddr(ifname, netip.MustParsePrefix(p)) })
	}
}

// route adds a route through via, or a direct one if via is empty.
func (b *builder) route(h *netlab.Host, ifname, dst, via string) {
	b.do(func() error {
		var gw netip.Addr
		if via != "" {
			gw = netip.MustParseAddr(via)
		}
		return h.AddRoute(netip.MustParsePrefix(dst), gw, ifname)
	})
}
