package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// The network of a world:
//
//	clients 192.0.2.10-            remote node 198.51.100.2, with its
//	        |                      pods 10.244.2.21-23
//	        | eth0 192.0.2.1        | eth1 198.51.100.1
//	      +-------------- node --------------+
//	        | veth-pod1     | veth-pod2    | veth-pod3
//	   10.244.1.11     10.244.1.12     10.244.1.13     gateway 10.244.1.1
//
// Everybody's default route is by way of the node, so an answer finds its way
// back through it whether the source was preserved or masqueraded, and the
// source tells the two apart. The node's own default route leads to the clients'
// host, which swallows what is not for it: packets to a virtual address that the
// backend let pass get no answer.
const (
	nodeName   = "node"
	remoteName = "remote"
	zone       = "zone-a"

	// servedPorts are the ports at which every pod answers.
	podPort, podPort2 = 8080, 8081
	// nodePortOwn is the port of a server of the node itself, in its own
	// namespace, which is no Service.
	nodePortOwn = 9000

	localPods, remotePods = 3, 3
	bridgeName            = "cni0"
	interfacePrefix       = "veth-"
)

// dual is an address in each family.
type dual map[tracker.Family]netip.Addr

func both(v4, v6 string) dual {
	return dual{tracker.IPv4: netip.MustParseAddr(v4), tracker.IPv6: netip.MustParseAddr(v6)}
}

// The addresses of the node.
var (
	primaryAddr   = both("192.0.2.1", "2001:db8:1::1")
	secondaryAddr = both("198.51.100.1", "2001:db8:2::1")
	gatewayAddr   = both("10.244.1.1", "fd00:10:244:1::1")
	loopbackAddr  = both("127.0.0.1", "::1")
)
