package iptables

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// probe tries every kind of rule, and selects what the programs and the kernel support: the counters, client affinity
// and SCTP are optional.
func (f *family) probe(ctx context.Context) error {
	var counters []string
	if f.accounts != nil {
		counters = countersFor(f.localhost)
	}
	f.counters = counters
	err := f.tryKinds(ctx)
	if outcomeOf(err).result == refused {
		f.counters, f.noSCTP, f.noAffinity = nil, true, true
		err = f.tryKinds(ctx)
		optional := func(missing func(error), set func(on bool)) {
			if err != nil {
				return
			}
			set(true)
			if err = f.tryKinds(ctx); outcomeOf(err).result == refused {
				set(false)
				missing(err)
				err = nil
			}
		}
		optional(f.notCounted, func(on bool) {
			if f.counters = nil; on {
				f.counters = counters
			}
		})
		optional(func(err error) { f.log.Warn("iptables: Services for SCTP get no rules", slog.Any("error", err)) }, func(on bool) { f.noSCTP = !on })
		optional(func(err error) { f.log.Warn("iptables: Services get no client affinity", slog.Any("error", err)) }, func(on bool) { f.noAffinity = !on })
	}
	f.can = f.counters
	if outcomeOf(err).result == refused {
		err = &dataplane.UnsupportedError{Backend: "iptables", Family: f.family, Feature: "a rule that every Service needs", Err: err}
	}
	return err
}

func (f *family) tryKinds(ctx context.Context) error {
	node := &ruleset.Node{Info: tracker.NodeInfo{Name: "node"}, NodePorts4: ruleset.NodePorts{All: true}, NodePorts6: ruleset.NodePorts{All: true}}
	m, err := newModel(f.settings, node)
	if err != nil {
		return err
	}
	var chains []chain
	for i, p := range protocols {
		addr := netip.MustParseAddr("192.0.2.1")
		if f.family == tracker.IPv6 {
			addr = netip.MustParseAddr("2001:db8::1")
		}
		s := &tracker.ServicePort{
			Key:       tracker.Key{ServicePortName: tracker.ServicePortName{Protocol: p}, Family: f.family},
			ClusterIP: addr, Port: 80, NodePort: uint16(30000 + i), HealthCheckNodePort: 30000, Affinity: time.Hour, ExternalLocal: true,
			ExternalIPs: []netip.Addr{addr.Next()}, LoadBalancerIPs: []netip.Addr{addr}, SourceRanges: []netip.Prefix{netip.PrefixFrom(addr, 24).Masked()},
		}
		ep := func(port uint16) *tracker.Endpoint {
			return &tracker.Endpoint{Addr: netip.AddrPortFrom(addr, port), Node: node.Info.Name, Ready: true, Serving: true, Weight: 1}
		}
		m.change(s.Key, ruleset.Compile(tracker.PortState{Port: s, Endpoints: []*tracker.Endpoint{ep(1), ep(2)}}, node), func(_, now []chain) { chains = append(chains, now...) })
	}
	m.allChains(func(c chain) { chains = append(chains, c) })
	return f.tryRules(ctx, chains)
}

// tryRules writes the rules of chains into one of each table that nothing leads to, and removes it, by one program.
func (f *family) tryRules(ctx context.Context, chains []chain) error {
	probe := [tables]chain{{table: filter, name: chainProbe}, {table: nat, name: chainProbe}}
	for _, c := range chains {
		for _, r := range c.rules {
			if to := iptext.Target(r); strings.HasPrefix(to, "KUBE-") {
				r = r[:strings.LastIndex(r, to)-len("-j ")] + "-j RETURN"
			}
			probe[c.table].rules = append(probe[c.table].rules, r)
		}
	}
	try, drop := &input{table: filter}, &input{table: filter}
	for _, c := range probe {
		try.Command(strings.TrimSuffix(newInput(c.table, []chain{c}, nil, nil, nil, nil).String(), "\n"))
	}
	for t := range tables {
		text := strings.TrimSuffix(newInput(t, nil, nil, []string{chainProbe}, []string{chainProbe}, nil).String(), "\n")
		try.Command(text)
		drop.Command(text)
	}
	err := f.write(ctx, try).err
	if err != nil {
		_ = f.write(ctx, drop) // one table may have its rules
	}
	return err
}
