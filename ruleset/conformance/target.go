package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

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
