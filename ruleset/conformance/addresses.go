package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

const (
	nodeName   = "node"
	remoteName = "remote"
	zone       = "zone-a"

	podPort, podPort2 = 8080, 8081
	// nodePortOwn is the port of a server on the node itself that is not a Service.
	nodePortOwn = 9000

	localPods         = 3
	defaultRemotePods = 3
	bridgeName        = "cni0"
	interfacePrefix   = "veth-"

	tcp  = v1.ProtocolTCP
	udp  = v1.ProtocolUDP
	sctp = v1.ProtocolSCTP
)

// maxNumber is the greatest number of a named address.
const maxNumber = 199

func pick(f tracker.Family, v4, v6 string) netip.Addr {
	a, _ := netip.ParseAddr(map[bool]string{false: v4, true: v6}[f == tracker.IPv6])
	return a
}

func pickPrefix(f tracker.Family, v4, v6 string) netip.Prefix {
	p, _ := netip.ParsePrefix(map[bool]string{false: v4, true: v6}[f == tracker.IPv6])
	return p
}

func numberOf(name string) (word string, n int) {
	word = strings.TrimRight(name, "0123456789")
	n, _ = strconv.Atoi(name[len(word):])
	return word, n
}

// named returns the address with a name, or the zero Addr if the family lacks it. ok reports
// whether there is such a name.
func named(name string, f tracker.Family) (a netip.Addr, ok bool) {
	switch name {
	case nodeName: // the address of the Node object
		return pick(f, "192.0.2.1", "2001:db8:1::1"), true
	case "node2":
		return pick(f, "198.51.100.1", "2001:db8:2::1"), true
	case "gateway": // of the pods
		return pick(f, "10.244.1.1", "fd00:10:244:1::1"), true
	case "loopback":
		return pick(f, "127.0.0.1", "::1"), true
	case "loopback2":
		return pick(f, "127.200.3.4", ""), true
	}
	kind, n := numberOf(name)
	switch kind {
	case "cluster":
		a = pick(f, "10.96.0.0", "fd00:10:96::")
	case "external":
		a = pick(f, "198.18.0.0", "2001:db8:e::")
	case "lb":
		a = pick(f, "203.0.113.0", "2001:db8:1b::")
	case "client":
		a = pick(f, "192.0.2.9", "2001:db8:1::9")
	case "pod":
		a = pick(f, "10.244.1.10", "fd00:10:244:1::10")
	case remoteName:
		a = pick(f, "10.244.2.20", "fd00:10:244:2::20")
	}
	if !a.IsValid() || n < 1 || n > maxNumber {
		return netip.Addr{}, false
	}
	b := a.AsSlice()
	b[len(b)-1] += byte(n)
	a, _ = netip.AddrFromSlice(b)
	return a, true
}

func address(name string, f tracker.Family) netip.Addr {
	a, ok := named(name, f)
	if !ok {
		panic("conformance: no address " + name)
	}
	return a
}

// numbered returns a function that returns the n-th address of a kind.
func numbered(kind string) func(tracker.Family, int) netip.Addr {
	return func(f tracker.Family, n int) netip.Addr { return address(fmt.Sprint(kind, n), f) }
}

// nodeAddresses returns all local addresses of the node in a world without further
// ones.
func nodeAddresses(f tracker.Family) (out []netip.Addr) {
	for _, name := range []string{nodeName, "node2", "gateway", "loopback"} {
		out = append(out, address(name, f))
	}
	return out
}

// The ranges of the addresses.
func localPodCIDR(f tracker.Family) netip.Prefix {
	return pickPrefix(f, "10.244.1.0/24", "fd00:10:244:1::/64")
}

func allPodsCIDR(f tracker.Family) netip.Prefix {
	return pickPrefix(f, "10.244.0.0/16", "fd00:10:244::/48")
}

func serviceCIDR(f tracker.Family) netip.Prefix {
	return pickPrefix(f, "10.96.0.0/16", "fd00:10:96::/112")
}

func nodeOf(pod string) string {
	if strings.HasPrefix(pod, remoteName) {
		return remoteName
	}
	return nodeName
}

// podNames returns the names of the pods, local ones first.
func podNames(remotePods int) (names []string) {
	for i := range localPods {
		names = append(names, fmt.Sprint("pod", i+1))
	}
	for i := range remotePods {
		names = append(names, fmt.Sprint(remoteName, i+1))
	}
	return names
}

// interfaceOf returns the node's interface on which packets of a host arrive, "" for the node itself.
func (c config) interfaceOf(host string) string {
	switch kind, _ := numberOf(host); {
	case kind == "client":
		return "eth0"
	case kind == remoteName:
		return "eth1"
	case kind != "pod":
		return ""
	case c.bridge:
		return bridgeName
	}
	return interfacePrefix + host
}

func sortWords(s string) string {
	words := strings.Fields(s)
	slices.Sort(words)
	return strings.Join(words, " ")
}
