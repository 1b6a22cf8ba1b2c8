package conformance

import (
	"fmt"
	"net/netip"

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
