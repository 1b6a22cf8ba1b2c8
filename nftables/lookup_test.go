//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// lookUp calls Lookup for packets to an address, port and protocol, or to a NodePort if the
// address is unspecified.
func lookUp(ctx context.Context, c Config, to netip.AddrPort, p v1.Protocol) (dataplane.Found, error) {
	return Lookup(ctx, c, dataplane.Query{Packet: ruleset.Packet{To: to, Protocol: p}, NodePort: to.Addr().IsUnspecified()})
}

// TestLookupAgreesWithRuleset compares the result for each frontend with the ruleset.
func TestLookupAgreesWithRuleset(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	c := r.backend.config
	if _, err := lookUp(t.Context(), c, netip.MustParseAddrPort("10.0.0.1:80"), v1.ProtocolTCP); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("without a table: %v", err)
	}
	for i := range 6 {
		edits := []func(*v1.Service){nodePort(30000 + int32(i))}
		if i%2 == 1 {
			edits = append(edits, backendtest.ExternalLocal)
		}
		if i%3 == 1 {
			edits = append(edits, sticky(int32(100+i)))
		}
		r.setBoth(i, upTo(i*5), edits...)
	}
	r.sync()
	addrs := func(list []*tracker.Endpoint) (out []netip.AddrPort) {
		for _, ep := range list {
			out = append(out, ep.Addr)
		}
		slices.SortFunc(out, netip.AddrPort.Compare)
		return out
	}
	n := 0
	for _, s := range r.engine.Snapshot().Ports {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			addr := f.Addr
			if f.Kind == ruleset.KindNodePort {
				addr = netip.IPv4Unspecified()
				if s.Key.Family == tracker.IPv6 {
					addr = netip.IPv6Unspecified()
				}
			}
			to := netip.AddrPortFrom(addr, f.Port)
			found := func(c layout.Handler, target ruleset.Target) dataplane.Found {
				chain := c.Chain()
				if c.Sticky {
					chain += ", chain " + model.StickyHandlerOf(s, target).Chain()
				}
				return dataplane.Found{
					Entry: true, Service: s.Key.ServicePortName.String(), Endpoints: addrs(s.Pool(target)),
					Where: fmt.Sprintf("table %s, chain %s", DefaultTable, chain),
				}
			}
			h, own := model.HandlersOf(s, f)
			external := found(h, f.Target)
			internal := external
			if f.ShortCircuit() && f.Internal == ruleset.TargetCluster {
				internal = found(own, f.Internal)
			}
			q := dataplane.Query{Packet: ruleset.Packet{To: to, Protocol: v1.ProtocolTCP}, NodePort: f.Kind == ruleset.KindNodePort}
			for fromInside, want := range map[bool]dataplane.Found{false: external, true: internal} {
				q.Internal = fromInside
				got, err := Lookup(t.Context(), c, q)
				if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%v: %+v, error %v\nwant %+v", to, got, err, want)
				}
				n += len(got.Endpoints)
			}
			if found, err := lookUp(t.Context(), c, to, v1.ProtocolUDP); found.Entry || err != nil {
				t.Errorf("%v by UDP: %+v, error %v", to, found, err)
			}
		}
	}
	if n < 100 {
		t.Errorf("only %d endpoints in all", n)
	}
}

// TestLookupNoticesFlushedRules deletes the rules of the table, and of a Service's chain alone. The maps,
// from which the endpoints are read, stay.
func TestLookupNoticesFlushedRules(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(0))
	r.sync()
	served, other := netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort("10.96.0.2:80")
	for _, step := range []struct {
		flush         string
		served, other string // the errors
	}{
		{"", "", ""},
		{"flush chain ip proxier no-endpoints", "chain no-endpoints has no rules", ""},
		{"flush table ip proxier", "chain ", "chain "},
	} {
		if step.flush != "" {
			r.nft(step.flush)
		}
		for to, want := range map[netip.AddrPort]string{served: step.served, other: step.other} {
			_, err := lookUp(t.Context(), r.backend.config, to, v1.ProtocolTCP)
			var drift *dataplane.DriftError
			if errors.As(err, &drift) != (want != "") || want == "" && err != nil || want != "" && !strings.HasPrefix(drift.What, want) {
				t.Errorf("%v after %q: %v, want %q", to, step.flush, err, want)
			}
		}
	}
}
