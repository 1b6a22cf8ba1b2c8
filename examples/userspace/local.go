package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localPorts gives every Service port a port of its own on the loopback address.
// Its place method is a hook: that is all --local takes, since what a Service port
// says after its hook is what the whole pipeline serves.
//
// Whether another program has a port is found out by listening there, and by
// nothing else: who looks first and listens later may come too late.
type localPorts struct {
	mu    sync.Mutex
	ports map[tracker.ServicePortName]uint16
	// taken is what a Service port has, or another program.
	taken map[localPort]bool
}

type localPort struct {
	proto  v1.Protocol
	number uint16
}

func newLocalPorts() *localPorts {
	return &localPorts{ports: map[tracker.ServicePortName]uint16{}, taken: map[localPort]bool{}}
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
// at first its own if that takes no privileges, until another program turns out to
// have it.
func (l *localPorts) assign(name tracker.ServicePortName, own uint16) (uint16, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
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
	return 0, fmt.Errorf("no port is free on the loopback address from %d on", first)
}

// avoid looks at what a sync has failed with. The ports that other programs have are
// not given to anybody again: the Service ports that had them are to be placed anew.
// It returns their Services, and the error without these failures.
func (l *localPorts) avoid(err error) (again []types.NamespacedName, rest error) {
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	others := map[tracker.Key]error{}
	for key, err := range partial.Failed {
		if inUse(err) {
			again = append(again, key.NamespacedName)
			delete(l.ports, key.ServicePortName)
		} else {
			others[key] = err
		}
	}
	if len(others) == 0 {
		return again, nil
	}
	return again, &ruleset.PartialError{Failed: others}
}

// table lists what is served where. A Service port that has no socket has no
// address either: anybody may listen there.
func table(s *ruleset.Snapshot, listens func(netip.AddrPort, v1.Protocol) bool) string {
	services := slices.SortedFunc(slices.Values(s.Services), func(a, b *ruleset.Service) int { return a.Key.Compare(b.Key) })
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
			fmt.Fprintf(w, "%s\t%d/%s\t%s\t%d\n", svc.Key.ServicePortName, settingsOf(svc.Port).port, svc.Key.Protocol,
				where, len(svc.Pool(f.Internal)))
		}
	}
	w.Flush()
	return b.String()
}
