package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/stall"
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
// The node is the default router of all other hosts, so a reply comes back through it
// whether the source was preserved or masqueraded, and the source shows which. The node's
// own default route leads to the clients' host, which drops packets that are not for it:
// packets to a virtual address that the backend passes get no reply.

// nodeAddresses returns all local addresses of the node.
func (n *network) nodeAddresses(f tracker.Family) []netip.Addr {
	out := nodeAddresses(f)
	for _, t := range n.bound {
		out = append(out, t.at(f).Addr())
	}
	return out
}

// bind adds addresses to the node.
func (n *network) bind(tb testing.TB, families []tracker.Family, addresses []target) {
	tb.Helper()
	n.bound = addresses
	for _, f := range families {
		for _, t := range addresses {
			if err := n.node.AddAddr("lo", single(t.at(f).Addr())); err != nil {
				tb.Fatal(err)
			}
		}
	}
}

// host is a source of connections: one address of one namespace.
type host struct {
	name string
	ns   *netlab.Host
	// in is the node's interface on which its packets arrive, "" for the node itself.
	in   string
	addr func(tracker.Family) netip.Addr
	// ports counts the allocated source ports.
	ports   *atomic.Uint32
	stalls  *stall.Detector
	excuses *excuses
	// client is Options.Client for a host on the node.
	client func(func() error) error
}

// open calls f, which opens a socket of the host.
func (h host) open(f func() error) error {
	if h.client != nil {
		return h.client(f)
	}
	return f()
}

// firstPort is the first source port for UDP and SCTP, and portCount the number of
// ports.
const firstPort, portCount = 10000, 50000

// port returns a source port that was not used for a long time. The node's connection
// tracking remembers for half a minute where the last datagrams from a port were
// sent, and sends the next ones there too.
func (h host) port() uint16 { return uint16(firstPort + h.ports.Add(1)%portCount) }

// pod is a server that connections can reach.
type pod struct {
	name, node string
	ns         *netlab.Host
	addr       func(tracker.Family) netip.Addr
}

// network holds the namespaces of a world.
type network struct {
	node  *netlab.Host
	hosts map[string]host
	pods  []pod
	// bound holds further addresses of the node.
	bound []target
}

// newNetwork builds the network with the given numbers of clients and remote pods.
// bridge puts the local pods behind a bridge. Connections are excused because of
// stalls and counted in counts.
func newNetwork(tb testing.TB, families []tracker.Family, clients, remotePods int, bridge bool, stalls *stall.Detector, counts *excuses) *network {
	tb.Helper()
	netlab.Require(tb)
	must := func(errs ...error) {
		tb.Helper()
		for _, err := range errs {
			if err != nil {
				tb.Fatal(err)
			}
		}
	}
	lab := netlab.New()
	tb.Cleanup(func() { lab.Close() })
	newHost := func(name string) *netlab.Host {
		tb.Helper()
		h, err := lab.Host(name)
		must(err)
		return h
	}
	node, outside, remote := newHost(nodeName), newHost("client"), newHost(remoteName)
	n := &network{node: node, hosts: map[string]host{}}
	add := func(name string, ns *netlab.Host, in string, addr func(tracker.Family) netip.Addr) {
		n.hosts[name] = host{name, ns, in, addr, new(atomic.Uint32), stalls, counts, nil}
	}

	must(node.Forward())
	must(
		// A hairpin packet leaves on the interface on which it arrived. This must not
		// cause an ICMP redirect.
		node.Sysctl("net/ipv4/conf/all/send_redirects", "0"),
		node.Sysctl("net/ipv4/conf/default/send_redirects", "0"))
	must(
		lab.Link(node, "eth0", outside, "eth0"),
		lab.Link(node, "eth1", remote, "eth0"),
	)
	ports := make([]*netlab.Host, localPods)
	names := make([]string, localPods)
	for i := range ports {
		ports[i] = newHost(fmt.Sprint("pod", i+1))
		names[i] = fmt.Sprint(interfacePrefix, "pod", i+1)
		must(lab.Link(node, names[i], ports[i], "eth0"))
	}
	if bridge {
		must(node.AddBridge(bridgeName, names...))
		// Bridged frames must not pass the rules for packets: everything is routed,
		// through the bridge's own address.
		for _, s := range []string{"ip", "ip6"} {
			path := "net/bridge/bridge-nf-call-" + s + "tables"
			if _, err := os.Stat("/proc/sys/" + path); err == nil {
				must(node.Sysctl(path, "0"))
			}
		}
	}

	everything := func(f tracker.Family) netip.Prefix { return netip.PrefixFrom(pick(f, "0.0.0.0", "::"), 0) }
	lan := func(a netip.Addr) netip.Prefix {
		if a.Is4() {
			return netip.PrefixFrom(a, 24)
		}
		return netip.PrefixFrom(a, 64)
	}
	for _, f := range families {
		must(
			node.AddAddr("eth0", lan(primary(f))),
			node.AddAddr("eth1", lan(secondary(f))),
			remote.AddAddr("eth0", lan(pick(f, "198.51.100.2", "2001:db8:2::2"))),
		)
		for i := 1; i <= clients; i++ {
			must(outside.AddAddr("eth0", lan(clientAddr(f, i))))
		}
		for i := 1; i <= remotePods; i++ {
			must(
				remote.AddAddr("eth0", single(remoteAddr(f, i))),
				node.AddRoute(single(remoteAddr(f, i)), pick(f, "198.51.100.2", "2001:db8:2::2"), ""),
			)
		}
		must(
			node.AddRoute(everything(f), clientAddr(f, 1), ""),
			outside.AddRoute(everything(f), primary(f), ""),
			remote.AddRoute(everything(f), secondary(f), ""),
		)
		for i, name := range names {
			if bridge {
				name = bridgeName
			}
			if !bridge || i == 0 {
				must(node.AddAddr(name, single(gateway(f))))
			}
			must(
				node.AddRoute(single(podAddr(f, i+1)), netip.Addr{}, name),
				ports[i].AddAddr("eth0", single(podAddr(f, i+1))),
				ports[i].AddRoute(single(gateway(f)), netip.Addr{}, "eth0"),
				ports[i].AddRoute(everything(f), gateway(f), "eth0"),
			)
		}
	}

	for i := 1; i <= clients; i++ {
		add(fmt.Sprint("client", i), outside, "eth0", func(f tracker.Family) netip.Addr { return clientAddr(f, i) })
	}
	for i := 1; i <= localPods; i++ {
		addr := func(f tracker.Family) netip.Addr { return podAddr(f, i) }
		in := names[i-1]
		if bridge {
			in = bridgeName
		}
		add(ports[i-1].Name, ports[i-1], in, addr)
		n.pods = append(n.pods, pod{ports[i-1].Name, nodeName, ports[i-1], addr})
	}
	for i := 1; i <= remotePods; i++ {
		addr := func(f tracker.Family) netip.Addr { return remoteAddr(f, i) }
		name := fmt.Sprint(remoteName, i)
		add(name, remote, "eth1", addr)
		n.pods = append(n.pods, pod{name, remoteName, remote, addr})
	}
	add(nodeName, node, "", primary)
	add("loopback", node, "", loopback)
	return n
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
