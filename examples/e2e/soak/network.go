//go:build linux

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// The network:
//
//	clients 192.0.2.10-13        far 198.51.100.2, all pods of the other nodes
//	        | eth0 192.0.2.1        | eth1 198.51.100.1    10.244.128.0/17
//	      +-------------- node --------------+
//	        | veth-pod1 ...
//	   10.244.1.11-13, pods of this node
//
// All routes lead through the node. The whole range of far's pods is local to far, and its
// servers answer at every address of the range. The API server, if there is one, runs on far.
type network struct {
	lab               *netlab.Lab
	node, client, far *netlab.Host
	places            []*place
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
	// farAddr is the address of the host far.
	farAddr = "198.51.100.2"
	// Numbers of clients and of pods on this node.
	clients, localPods = 4, 3
	// farPods is the number of pods on other nodes, and nodePods that on each of them.
	farPods, nodePods = 1 << 15, 1 << 8
	// podPort is the TCP and UDP port at which every pod answers.
	podPort = 8080
)

var families = []tracker.Family{tracker.IPv4, tracker.IPv6}

// localPodCIDRs holds the ranges of this node's pods.
var localPodCIDRs = [2]string{"10.244.1.0/24", "fd00:10:244:1::/64"}

// nodeAddresses holds all addresses of the node, by family.
var nodeAddresses = [2][]netip.Addr{
	{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("127.0.0.1")},
	{netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:2::1"), netip.MustParseAddr("fd00:10:244:1::1"), netip.MustParseAddr("::1")},
}

// local returns a source address and port that the place has not used recently. For a
// while the node's connection tracking sends packets from a used port to the same endpoint.
func (p *place) local(to netip.AddrPort) netip.AddrPort {
	const first, count = 10000, 22000 // below the kernel's ephemeral ports
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

// newNetwork builds the network and starts the servers.
func newNetwork() (_ *network, err error) {
	n := &network{lab: netlab.New()}
	defer func() {
		if err != nil {
			n.lab.Close()
		}
	}()
	b := &netlab.Builder{Lab: n.lab}
	n.node, n.client, n.far = b.Host(nodeName), b.Host("client"), b.Host("far")
	b.Do(n.node.Forward)
	for _, which := range []string{"all", "default"} {
		b.Do(func() error { return n.node.Sysctl("net/ipv4/conf/"+which+"/send_redirects", "0") })
	}
	b.Link(n.node, "eth0", n.client, "eth0")
	b.Addrs(n.node, "eth0", "192.0.2.1/24", "2001:db8:1::1/64")
	for i := range clients {
		p := &place{name: fmt.Sprint("client-", i+1), host: n.client, in: "eth0", addr: [2]netip.Addr{number("192.0.2.10", i), number("2001:db8:1::10", i)}}
		b.Addrs(n.client, "eth0", p.addr[0].String()+"/24", p.addr[1].String()+"/64")
		n.places = append(n.places, p)
	}
	b.Link(n.node, "eth1", n.far, "eth0")
	b.Addrs(n.node, "eth1", "198.51.100.1/24", "2001:db8:2::1/64")
	b.Addrs(n.far, "eth0", farAddr+"/24", "2001:db8:2::2/64")
	for f, everything := range []string{"0.0.0.0/0", "::/0"} {
		b.Routes(n.client, "eth0", []string{"192.0.2.1", "2001:db8:1::1"}[f], everything)
		b.Routes(n.node, "eth0", []string{"192.0.2.10", "2001:db8:1::10"}[f], everything)
		b.Routes(n.far, "eth0", []string{"198.51.100.1", "2001:db8:2::1"}[f], everything)
		pods := []string{"10.244.128.0/17", "fd00:10:244:2::/64"}[f]
		b.Routes(n.node, "eth1", []string{farAddr, "2001:db8:2::2"}[f], pods)
		b.Do(func() error { return n.far.AddLocal(netip.MustParsePrefix(pods)) })
	}
	n.places = append(n.places,
		&place{name: "far", host: n.far, in: "eth1", addr: [2]netip.Addr{netip.MustParseAddr(farAddr), netip.MustParseAddr("2001:db8:2::2")}},
		&place{name: "node", host: n.node, addr: [2]netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}})
	b.Do(func() error { return serve(n.far) })
	for i := range localPods {
		h, veth := b.Host(fmt.Sprint("pod-", i+1)), fmt.Sprint("veth-pod", i+1)
		b.Link(n.node, veth, h, "eth0")
		b.Addrs(n.node, veth, "10.244.1.1/32", "fd00:10:244:1::1/128")
		for f, bits := range []string{"/32", "/128"} {
			own, gateway := podAddr(i, f).String(), []string{"10.244.1.1", "fd00:10:244:1::1"}[f]
			b.Routes(n.node, veth, "", own+bits)
			b.Addrs(h, "eth0", own+bits)
			b.Routes(h, "eth0", "", gateway+bits)
			b.Routes(h, "eth0", gateway, []string{"0.0.0.0/0", "::/0"}[f])
		}
		b.Do(func() error { return serve(h) })
		n.places = append(n.places, &place{name: h.Name, host: h, in: veth, addr: [2]netip.Addr{podAddr(i, 0), podAddr(i, 1)}})
	}
	return n, b.Err
}

// serve starts the servers of a host, which greet each client and run until the process ends.
func serve(h *netlab.Host) error {
	at := fmt.Sprintf("[::]:%d", podPort)
	l, err := h.Listen("tcp", at)
	if err != nil {
		return err
	}
	go netlab.Serve(l, netlab.Greet)
	p, err := h.ListenPacket("udp", at)
	if err != nil {
		return err
	}
	return serveUDP(p.(*net.UDPConn))
}

// serveUDP answers each datagram from the address that it was sent to, which IPV6_PKTINFO holds in
// both directions, for IPv4 as a mapped address (ipv6(7)). The addresses of a local range belong to
// no interface; IPV6_FREEBIND (linux/in6.h) allows the socket to send from them.
func serveUDP(c *net.UDPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var option error
	if err := raw.Control(func(fd uintptr) {
		option = errors.Join(
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1),
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1))
	}); err != nil || option != nil {
		return errors.Join(err, option)
	}
	go func() {
		buf, oob := make([]byte, 100), make([]byte, 100)
		for {
			_, n, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
			if err != nil {
				return
			}
			if list, err := unix.ParseSocketControlMessage(oob[:n]); err == nil && len(list) == 1 && len(list[0].Data) == unix.SizeofInet6Pktinfo {
				self := netip.AddrPortFrom(netip.AddrFrom16([16]byte(list[0].Data[:16])), podPort)
				_, _, _ = c.WriteMsgUDPAddrPort(netlab.Greeting(self, from), oob[:n], from) // the client reports a missing answer
			}
		}
	}()
	return nil
}
