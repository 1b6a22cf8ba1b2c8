package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

const (
	nodeName   = "node"
	remoteName = "remote"
	zone       = "zone-a"

	// podPort and podPort2 are the ports of every pod.
	podPort, podPort2 = 8080, 8081
	// nodePortOwn is the port of a server on the node itself that is not a Service.
	nodePortOwn = 9000

	localPods = 3
	// defaultRemotePods is the default number of pods on the remote node.
	defaultRemotePods = 3
	bridgeName        = "cni0"
	interfacePrefix   = "veth-"
)

// pick returns the address of family f.
func pick(f tracker.Family, v4, v6 string) netip.Addr {
	return pickFrom(f, netip.MustParseAddr, v4, v6)
}

func pickFrom[T any](f tracker.Family, parse func(string) T, v4, v6 string) T {
	if f == tracker.IPv6 {
		return parse(v6)
	}
	return parse(v4)
}

// numbered returns the base address plus n, for n below 200.
func numbered(f tracker.Family, v4, v6 string, n int) netip.Addr {
	b := pick(f, v4, v6).AsSlice()
	b[len(b)-1] += byte(n)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// The node's addresses: the primary one, which the Node object has, a second one, and
// the pods' gateway.
func primary(f tracker.Family) netip.Addr   { return pick(f, "192.0.2.1", "2001:db8:1::1") }
func secondary(f tracker.Family) netip.Addr { return pick(f, "198.51.100.1", "2001:db8:2::1") }
func gateway(f tracker.Family) netip.Addr   { return pick(f, "10.244.1.1", "fd00:10:244:1::1") }
func loopback(f tracker.Family) netip.Addr  { return pick(f, "127.0.0.1", "::1") }

// nodeAddresses returns all local addresses of the node in a world without further
// ones.
func nodeAddresses(f tracker.Family) []netip.Addr {
	return []netip.Addr{primary(f), secondary(f), gateway(f), loopback(f)}
}

// clientAddr returns the address of the n-th client, from 1.
func clientAddr(f tracker.Family, n int) netip.Addr {
	return numbered(f, "192.0.2.9", "2001:db8:1::9", n)
}

// podAddr returns the address of the n-th local pod, from 1.
func podAddr(f tracker.Family, n int) netip.Addr {
	return numbered(f, "10.244.1.10", "fd00:10:244:1::10", n)
}

// remoteAddr returns the address of the n-th pod of the remote node, from 1.
func remoteAddr(f tracker.Family, n int) netip.Addr {
	return numbered(f, "10.244.2.20", "fd00:10:244:2::20", n)
}

// The ranges of the addresses.
func localPodCIDR(f tracker.Family) netip.Prefix {
	return pickFrom(f, netip.MustParsePrefix, "10.244.1.0/24", "fd00:10:244:1::/64")
}

func allPodsCIDR(f tracker.Family) netip.Prefix {
	return pickFrom(f, netip.MustParsePrefix, "10.244.0.0/16", "fd00:10:244::/48")
}

func serviceCIDR(f tracker.Family) netip.Prefix {
	return pickFrom(f, netip.MustParsePrefix, "10.96.0.0/16", "fd00:10:96::/112")
}

// podNamed returns the node and the addresses of the named pod.
func podNamed(name string) (node string, addr func(tracker.Family) netip.Addr) {
	var n int
	if _, err := fmt.Sscanf(name, "pod%d", &n); err == nil {
		return nodeName, func(f tracker.Family) netip.Addr { return podAddr(f, n) }
	}
	if _, err := fmt.Sscanf(name, remoteName+"%d", &n); err == nil {
		return remoteName, func(f tracker.Family) netip.Addr { return remoteAddr(f, n) }
	}
	panic("conformance: no pod " + name)
}

// podNames returns the names of the pods, local ones first.
func podNames(remotePods int) (names []string) {
	for i := range localPods {
		names = append(names, fmt.Sprint("pod", i+1))
	}
	return append(names, remotes(remotePods)...)
}

// target is the destination of connections, in every family.
type target struct {
	name string
	at   func(tracker.Family) netip.AddrPort
}

func at(name string, port int, addr func(tracker.Family) netip.Addr) target {
	return target{
		name: fmt.Sprintf("%s port %d", name, port),
		at:   func(f tracker.Family) netip.AddrPort { return netip.AddrPortFrom(addr(f), uint16(port)) },
	}
}

// clusterIP, externalIP and loadBalancerIP return the addresses of the service with
// the given number.
func clusterIP(number, port int) target {
	return at(fmt.Sprint("cluster IP ", number), port, func(f tracker.Family) netip.Addr {
		return numbered(f, "10.96.0.0", "fd00:10:96::", number)
	})
}

func externalIP(number, port int) target {
	return at(fmt.Sprint("external IP ", number), port, func(f tracker.Family) netip.Addr {
		return numbered(f, "198.18.0.0", "2001:db8:e::", number)
	})
}

func loadBalancerIP(number, port int) target {
	return at(fmt.Sprint("load-balancer IP ", number), port, func(f tracker.Family) netip.Addr {
		return numbered(f, "203.0.113.0", "2001:db8:1b::", number)
	})
}

// in returns the target in one family alone.
func in(f tracker.Family, t target) target {
	return target{
		name: t.name,
		at: func(other tracker.Family) netip.AddrPort {
			if other != f {
				return netip.AddrPort{}
			}
			return t.at(f)
		},
	}
}

// The node's own addresses.
func atPrimary(port int) target   { return at("the node's primary address", port, primary) }
func atSecondary(port int) target { return at("the node's second address", port, secondary) }
func atGateway(port int) target   { return at("the pods' gateway", port, gateway) }
func atLoopback(port int) target  { return at("loopback", port, loopback) }

// atLoopback2 is a further loopback address, which IPv6 does not have.
func atLoopback2(port int) target {
	return at("loopback2", port, func(f tracker.Family) netip.Addr {
		if f == tracker.IPv6 {
			return netip.Addr{}
		}
		return netip.AddrFrom4([4]byte{127, 200, 3, 4})
	})
}

// atPod is a local pod's own address.
func atPod(n, port int) target {
	return at(fmt.Sprint("pod", n), port, func(f tracker.Family) netip.Addr { return podAddr(f, n) })
}

const (
	tcp  = v1.ProtocolTCP
	udp  = v1.ProtocolUDP
	sctp = v1.ProtocolSCTP
)

// row is one line of a world: connections of one kind and their expected result.
// Trace determines the result. want documents it, and detects worlds that do not test
// what they should.
type row struct {
	// from lists the hosts, by name.
	from  string
	proto v1.Protocol
	to    target
	// want is "reject", "drop", "pass", or the names of the pods that may be reached,
	// with ":port" if the port is not podPort, and with a * if the pod sees the
	// node's address in place of the source.
	want string
}

// enough bounds the failures reported for one check.
const enough = 8

func sortWords(s string) string {
	words := strings.Fields(s)
	slices.Sort(words)
	return strings.Join(words, " ")
}
