package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// errDiffers ends explain when the kernel would treat a packet otherwise.
var errDiffers = errors.New("the kernel's rules are not what they should be")

// question is what explain asks about the kernel.
type question struct {
	packet  ruleset.Packet
	verdict ruleset.Verdict
	// near: the packet comes from the node or one of its pods, to a frontend that
	// treats those otherwise.
	near bool
}

// lookupNFTables tells what the tables of mode nftables do with a packet.
func lookupNFTables(ctx context.Context, out io.Writer, q question) error {
	f := q.verdict.Frontend
	found, err := nftables.Lookup(ctx, nftables.Config{}, ruleset.Query{
		Packet: q.packet, Internal: q.near, NodePort: f != nil && f.Kind == ruleset.NodePort,
	})
	switch {
	case errors.Is(err, ruleset.ErrNoRules):
		fmt.Fprintln(out, "kernel: mode nftables has no rules in this network namespace")
		return nil
	case err != nil:
		return err
	case !found.Entry:
		return q.compare(out, "no entry for it", "", nil, q.entry())
	}
	return q.compare(out, found.Where, found.Service, found.Endpoints, q.entry())
}

// lookupIPTables compares what table nat does with a packet.
func lookupIPTables(ctx context.Context, out io.Writer, q question) error {
	found, err := iptables.Lookup(ctx, iptables.Config{}, ruleset.Query{Packet: q.packet, Internal: q.near})
	switch {
	case errors.Is(err, ruleset.ErrNoRules):
		fmt.Fprintln(out, "kernel: mode iptables has no rules in this network namespace")
		return nil
	case err != nil:
		return err
	case !found.Entry:
		found.Where = "no rule for it"
	}
	return q.compare(out, found.Where, found.Service, found.Endpoints, q.verdict.Endpoints)
}

// entry returns the endpoints that the packet's entry should lead to, which it has
// though packets of its source are dropped.
func (q question) entry() []*tracker.Endpoint {
	f := q.verdict.Frontend
	if f == nil || f.Admits(q.packet.From) {
		return q.verdict.Endpoints
	}
	if q.near {
		return q.verdict.Service.Pool(f.Near)
	}
	return q.verdict.Service.Pool(f.Target)
}

// compare says what was found in the kernel, and whether that is what should be.
func (q question) compare(out io.Writer, where, service string, eps []netip.AddrPort, expected []*tracker.Endpoint) error {
	fmt.Fprintf(out, "kernel: %s", where)
	if service != "" {
		fmt.Fprintf(out, ", for %s", service)
	}
	fmt.Fprintln(out)
	for _, ep := range eps {
		fmt.Fprintf(out, "kernel: endpoint %v\n", ep)
	}
	var want []netip.AddrPort
	wantService := ""
	if q.verdict.Service != nil {
		wantService = q.verdict.Service.Key.ServicePortName.String()
	}
	for _, ep := range expected {
		want = append(want, ep.Addr)
	}
	slices.SortFunc(want, netip.AddrPort.Compare)
	if !slices.Equal(eps, want) || service != "" && service != wantService {
		fmt.Fprintln(out, "kernel: DIFFERS from what should be")
		return errDiffers
	}
	fmt.Fprintln(out, "kernel: agrees")
	return nil
}

// near reports whether a packet is one that a frontend treats as from the node or
// its pods.
func near(n *ruleset.Node, p ruleset.Packet, f *ruleset.Frontend) bool {
	return f != nil && f.ShortCircuit() && (p.InInterface == "" || n.LocalTraffic.Recognises(p.From, p.InInterface))
}
