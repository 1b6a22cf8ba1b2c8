package main

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localPorts assigns every Service port its own port on the loopback address. Its method
// place is a hook that changes the Service port. --local needs nothing else, because the
// pipeline serves a Service port as its hook leaves it.
//
// Only a listen call shows whether another program uses a port. Another program could take
// the port between an earlier check and the listen call.
type localPorts struct {
	ports map[tracker.ServicePortName]uint16
	// taken holds the ports that a Service port or another program uses.
	taken map[localPort]bool
}

type localPort struct {
	proto  v1.Protocol
	number uint16
}

func newLocalPorts() *localPorts {
	return &localPorts{ports: map[tracker.ServicePortName]uint16{}, taken: map[localPort]bool{}}
}

// place moves a Service port to the loopback address of its family. It removes the NodePort,
// all other addresses and the traffic policies.
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

// assign returns a Service port's number on the loopback address. It is the Service's own
// port if that is free and needs no privileges, and stays the same until avoid finds that
// another program uses it.
func (l *localPorts) assign(name tracker.ServicePortName, own uint16) (uint16, error) {
	if n, ok := l.ports[name]; ok {
		return n, nil
	}
	// 80 becomes 10080. If that is taken, the next free port is used.
	first := own
	if own < 1024 {
		first = 10000 + own
	}
	for i := range 2000 {
		n := int(first) + i
		if n > 65535 {
			break
		}
		p := localPort{name.Protocol, uint16(n)}
		if l.taken[p] {
			continue
		}
		l.taken[p] = true
		l.ports[name] = p.number
		return p.number, nil
	}
	return 0, fmt.Errorf("no free port on the loopback address from %d on", first)
}

// avoid handles the error of a sync. It never assigns ports of other programs again. It
// returns the Services whose ports must be placed again, and the error without these
// failures.
func (l *localPorts) avoid(err error) (again []types.NamespacedName, rest error) {
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) {
		return nil, err
	}
	others := map[tracker.Key]error{}
	for key, err := range partial.Failed {
		// Elsewhere the error has another number, so every failure to listen counts.
		if errors.Is(err, syscall.EADDRINUSE) || runtime.GOOS == "windows" {
			again = append(again, key.NamespacedName)
			delete(l.ports, key.ServicePortName)
		} else {
			others[key] = err
		}
	}
	switch {
	case len(again) == 0:
		return nil, err // perhaps only stale addresses are left
	case len(others) == 0:
		return again, nil
	}
	return again, &ruleset.PartialError{Failed: others}
}

// table returns a table of Service ports with their addresses. A Service port without a
// socket has no address, because another program may listen there.
func table(s *ruleset.Snapshot, listens func(netip.AddrPort, v1.Protocol) bool) string {
	services := slices.SortedFunc(slices.Values(s.Ports), func(a, b *ruleset.Port) int { return a.Key.Compare(b.Key) })
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tPORT\tLOCAL ADDRESS\tENDPOINTS")
	for _, svc := range services {
		if svc.Key.Protocol == v1.ProtocolSCTP {
			continue
		}
		for _, f := range svc.Frontends {
			at := netip.AddrPortFrom(f.Addr, f.Port)
			where := "-"
			if listens(at, svc.Key.Protocol) {
				where = at.String()
			}
			fmt.Fprintf(w, "%s\t%d/%s\t%s\t%d\n", svc.Key.ServicePortName, settingsOf(svc.Spec).port, svc.Key.Protocol,
				where, len(svc.Pool(f.Internal)))
		}
	}
	w.Flush()
	return b.String()
}
