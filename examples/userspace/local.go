package main

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localPorts gives every Service port a port of its own on the loopback address.
// Its place method is a hook: that is all --local takes, since what a Service port
// says after its hook is what the whole pipeline serves.
type localPorts struct {
	ports map[tracker.ServicePortName]uint16
	taken map[localPort]bool
	// free reports whether nobody else has a port.
	free func(localPort) bool
}

type localPort struct {
	proto  v1.Protocol
	number uint16
}

func newLocalPorts() *localPorts {
	return &localPorts{map[tracker.ServicePortName]uint16{}, map[localPort]bool{}, isFree}
}

// place moves a Service port to the loopback address of its family. There it is
// alone: with no NodePort and no other address, and no endpoint nearer than
// another.
func (l *localPorts) place(p *tracker.ServicePort) error {
	number, err := l.assign(p.Key.ServicePortName, p.Port)
	if err != nil {
		return err
	}
	own := settingsOf(p)
	own.port = p.Port
	p.Ext = own
	p.ClusterIP = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if p.Key.Family == tracker.IPv6 {
		p.ClusterIP = netip.IPv6Loopback()
	}
	p.Port, p.NodePort, p.HealthCheckNodePort = number, 0, 0
	p.ExternalIPs, p.LoadBalancerIPs, p.SourceRanges = nil, nil, nil
	p.InternalLocal, p.ExternalLocal = false, false
	return nil
}

// assign returns a Service port's number on the loopback address: always the same,
// at first its own if that takes no privileges and is free.
func (l *localPorts) assign(name tracker.ServicePortName, own uint16) (uint16, error) {
	if n, ok := l.ports[name]; ok {
		return n, nil
	}
	// 80 becomes 10080, and what is taken the next that is not.
	first := own
	if own < 1024 {
		first = 10000 + own
	}
	for i := range 2000 {
		n := int(first) + i
		p := localPort{name.Protocol, uint16(n)}
		if n > 65535 {
			break
		}
		if l.taken[p] || !l.free(p) {
			continue
		}
		l.taken[p] = true
		l.ports[name] = p.number
		return p.number, nil
	}
	return 0, fmt.Errorf("no port is free on the loopback address from %d on", first)
}

// isFree tries to listen. On a system without IPv6 there is nobody there either.
func isFree(p localPort) bool {
	for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		at := netip.AddrPortFrom(a, p.number).String()
		var err error
		if p.proto == v1.ProtocolUDP {
			var c net.PacketConn
			if c, err = net.ListenPacket("udp", at); err == nil {
				c.Close()
			}
		} else {
			var l net.Listener
			if l, err = net.Listen("tcp", at); err == nil {
				l.Close()
			}
		}
		if err != nil && a.Is4() || inUse(err) {
			return false
		}
	}
	return true
}

// table lists what is served where.
func table(s *ruleset.Snapshot) string {
	services := slices.SortedFunc(slices.Values(s.Services), func(a, b *ruleset.Service) int { return a.Key.Compare(b.Key) })
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tPORT\tLOCAL ADDRESS\tENDPOINTS")
	for _, svc := range services {
		if svc.Key.Protocol == v1.ProtocolSCTP {
			continue
		}
		for _, f := range svc.Frontends {
			fmt.Fprintf(w, "%s\t%d/%s\t%s\t%d\n", svc.Key.ServicePortName, settingsOf(svc.Port).port, svc.Key.Protocol,
				netip.AddrPortFrom(f.Addr, f.Port), len(svc.Pool(f.Near)))
		}
	}
	w.Flush()
	return b.String()
}
