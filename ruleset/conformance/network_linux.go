package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/tracker"
)

// The network of a world:
//
//	clients 192.0.2.10-            remote node 198.51.100.2, with its
//	        |                      pods 10.244.2.21-
//	        | eth0 192.0.2.1        | eth1 198.51.100.1
//	      +-------------- node --------------+
//	        | veth-pod1     | veth-pod2    | veth-pod3
//	   10.244.1.11     10.244.1.12     10.244.1.13     gateway 10.244.1.1
//
// The node is the default router of all other hosts, so a reply comes back through it, and its source shows whether it
// was masqueraded. The node's own default route leads to the clients' host, which drops packets that are not for it.

// host is a source of connections: one address of one namespace.
type host struct {
	name string
	ns   *netlab.Host
	// ports counts the allocated source ports, and tcpPorts those for TCP.
	ports, tcpPorts *atomic.Uint32
	stalls          *stall.Detector
	excuses         *excuses
	// client is Options.Client for a host on the node.
	client func(func() error) error
}

func (h host) open(f func() error) error {
	if h.client != nil {
		return h.client(f)
	}
	return f()
}

const firstPort, portCount = 10000, 50000

// port returns a source port that was not used for a long time: connection tracking remembers for half a minute where
// the last datagrams from a port were sent.
func (h host) port() uint16 { return uint16(firstPort + h.ports.Add(1)%portCount) }

// tcpPort returns such a port for TCP: connection tracking remembers a packet without an answer, or with an ICMP
// error, for two minutes, and a refused one for ten seconds. The port may be in use.
func (h host) tcpPort() uint16 { return uint16(firstPort + h.tcpPorts.Add(1)%portCount) }

type network struct {
	node *netlab.Host

	hosts map[string]host
}

// newNetwork builds the network of a world, with servers on all pods and the node.
// Connections are excused because of stalls and counted in counts.
func newNetwork(s *World, stalls *stall.Detector, counts *excuses) *network {
	s.tb.Helper()
	must := func(errs ...error) {
		s.tb.Helper()
		for _, err := range errs {
			if err != nil {
				s.tb.Fatal(err)
			}
		}
	}
	names := podNames(0)
	lab, hosts := netlab.NewHosts(s.tb, append(names, nodeName, remoteName, "client")...)
	node, remote, outside := hosts[nodeName], hosts[remoteName], hosts["client"]
	n := &network{node: node, hosts: map[string]host{}}
	add := func(name string, ns *netlab.Host) {
		n.hosts[name] = host{name, ns, new(atomic.Uint32), new(atomic.Uint32), stalls, counts, nil}
	}

	node.Forward()
	must(
		// A hairpin packet leaves on the interface on which it arrived. This must not
		// cause an ICMP redirect.
		node.Sysctl("net/ipv4/conf/all/send_redirects", "0"),
		node.Sysctl("net/ipv4/conf/default/send_redirects", "0"))
	lab.Link(node, "eth0", outside, "eth0")
	lab.Link(node, "eth1", remote, "eth0")
	var ports []string
	for _, name := range names {
		ports = append(ports, interfacePrefix+name)
		lab.Link(node, interfacePrefix+name, hosts[name], "eth0")
	}
	if s.config.bridge {
		must(node.AddBridge(bridgeName, ports...))
		// Bridged frames must not pass the rules for packets.
		for _, ip := range []string{"ip", "ip6"} {
			path := "net/bridge/bridge-nf-call-" + ip + "tables"
			if _, err := os.Stat("/proc/sys/" + path); err == nil {
				must(node.Sysctl(path, "0"))
			}
		}
	}

	for _, f := range s.Env.Families {
		n.addAddresses(s, f, hosts, must)
	}
	for i := 1; i <= s.config.clients; i++ {
		add(fmt.Sprint("client", i), outside)
	}
	for _, name := range s.pods {
		ns := remote
		if nodeOf(name) == nodeName {
			ns = hosts[name]
		}
		add(name, ns)
	}
	add(nodeName, node)
	add("loopback", node)
	n.serve(s)
	if s.config.sctp {
		n.serveSCTP(s)
	}
	return n
}

// addAddresses gives the hosts their addresses and routes in a family. It passes errors to must.
func (n *network) addAddresses(s *World, f tracker.Family, hosts map[string]*netlab.Host, must func(...error)) {
	node, remote, outside := n.node, hosts[remoteName], hosts["client"]
	everything := func(f tracker.Family) netip.Prefix { return netip.PrefixFrom(pick(f, "0.0.0.0", "::"), 0) }
	lan := func(a netip.Addr) netip.Prefix {
		if a.Is4() {
			return netip.PrefixFrom(a, 24)
		}
		return netip.PrefixFrom(a, 64)
	}
	must(
		node.AddAddr("eth0", lan(address(nodeName, f))),
		node.AddAddr("eth1", lan(address("node2", f))),
		remote.AddAddr("eth0", lan(pick(f, "198.51.100.2", "2001:db8:2::2"))),
	)
	for i := 1; i <= s.config.clients; i++ {
		must(outside.AddAddr("eth0", lan(address(fmt.Sprint("client", i), f))))
	}
	for i := 1; i <= s.config.remotePods; i++ {
		must(
			remote.AddAddr("eth0", single(address(fmt.Sprint(remoteName, i), f))),
			node.AddRoute(single(address(fmt.Sprint(remoteName, i), f)), pick(f, "198.51.100.2", "2001:db8:2::2"), ""),
		)
	}
	must(
		node.AddRoute(everything(f), address("client1", f), ""),
		outside.AddRoute(everything(f), address(nodeName, f), ""),
		remote.AddRoute(everything(f), address("node2", f), ""),
		// Packets of the clients to loopback addresses are sent to the node.
		outside.DeleteLoopback(address("loopback", f)),
		outside.AddRoute(pickPrefix(f, "127.0.0.0/8", "::1/128"), address(nodeName, f), ""),
	)
	for i, name := range podNames(0) {
		pod, in, at := hosts[name], s.config.interfaceOf(name), single(address(name, f))
		if !s.config.bridge || i == 0 {
			must(node.AddAddr(in, single(address("gateway", f))))
		}
		must(
			node.AddRoute(at, netip.Addr{}, in),
			pod.AddAddr("eth0", at),
			pod.AddRoute(single(address("gateway", f)), netip.Addr{}, "eth0"),
			pod.AddRoute(everything(f), address("gateway", f), "eth0"),
		)
	}
	for _, name := range s.config.bound {
		must(node.AddAddr("lo", single(address(name, f))))
	}
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func (n *network) serve(s *World) {
	for _, f := range s.Env.Families {
		for _, pod := range s.pods {
			for _, port := range []uint16{podPort, podPort2} {
				n.hosts[pod].ns.Greet(netip.AddrPortFrom(address(pod, f), port))
			}
		}
		for _, a := range s.nodeAddresses(f) {
			n.node.Greet(netip.AddrPortFrom(a, nodePortOwn))
		}
	}
}
