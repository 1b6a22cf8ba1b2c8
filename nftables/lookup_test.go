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
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
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
	h := netlab.NewHost(t)
	c := Config{NetNS: h.File()}
	at := netip.MustParseAddrPort
	if _, err := lookUp(t.Context(), c, at("10.0.0.1:80"), v1.ProtocolTCP); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("without a table: %v", err)
	}
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}))(t)
	for i := range 6 {
		name := fmt.Sprint("s", i)
		s := &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeNodePort, ClusterIPs: []string{fmt.Sprintf("10.0.0.%d", i+1), fmt.Sprintf("fd00::%d", i+1)},
				IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
				Ports:      []v1.ServicePort{{Name: "p", Port: 80, NodePort: 30000 + int32(i), Protocol: v1.ProtocolUDP}},
			},
		}
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
		if i%2 == 1 {
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
		if i%3 == 1 {
			timeout := int32(100 + i)
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &timeout}}
		}
		tr.SetService(s)
		for _, typ := range []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6} {
			port, portName, protocol := int32(8080), "p", v1.ProtocolUDP
			sl := &discovery.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name + string(typ), Labels: map[string]string{discovery.LabelServiceName: name}},
				AddressType: typ, Ports: []discovery.EndpointPort{{Name: &portName, Port: &port, Protocol: &protocol}},
			}
			for j := range i * 5 {
				node := []string{"here", "there"}[j%2]
				addr := fmt.Sprintf("10.1.%d.%d", i, j+1)
				if typ == discovery.AddressTypeIPv6 {
					addr = fmt.Sprintf("fd01::%d:%d", i, j+1)
				}
				sl.Endpoints = append(sl.Endpoints, discovery.Endpoint{Addresses: []string{addr}, NodeName: &node})
			}
			tr.SetSlice(sl)
		}
	}
	e := program(t, c, tr)
	addrs := func(list []*tracker.Endpoint) (out []netip.AddrPort) {
		for _, ep := range list {
			out = append(out, ep.Addr)
		}
		slices.SortFunc(out, netip.AddrPort.Compare)
		return out
	}
	n := 0
	for _, s := range e.Snapshot().Ports {
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
			q := dataplane.Query{Packet: ruleset.Packet{To: to, Protocol: v1.ProtocolUDP}, NodePort: f.Kind == ruleset.KindNodePort}
			for fromInside, want := range map[bool]dataplane.Found{false: external, true: internal} {
				q.Internal = fromInside
				got, err := Lookup(t.Context(), c, q)
				if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%v: %+v, error %v\nwant %+v", to, got, err, want)
				}
				n += len(got.Endpoints)
			}
			if found, err := lookUp(t.Context(), c, to, v1.ProtocolTCP); found.Entry || err != nil {
				t.Errorf("%v by TCP: %+v, error %v", to, found, err)
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
	h := netlab.NewHost(t)
	c := Config{NetNS: h.File(), Families: []tracker.Family{tracker.IPv4}}
	tr := must.Get(tracker.New(tracker.Config{}))(t)
	tr.SetService(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s"}, Spec: v1.ServiceSpec{ClusterIP: "10.0.0.1", Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}}})
	program(t, c, tr)
	served, other := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80")
	for _, step := range []struct {
		flush         string
		served, other string // the errors
	}{
		{"", "", ""},
		{"flush chain ip proxier no-endpoints", "chain no-endpoints has no rules", ""},
		{"flush table ip proxier", "chain ", "chain "},
	} {
		if step.flush != "" {
			must.Get(h.Run(t, "nft", step.flush))(t)
		}
		for to, want := range map[netip.AddrPort]string{served: step.served, other: step.other} {
			_, err := lookUp(t.Context(), c, to, v1.ProtocolTCP)
			var drift *dataplane.DriftError
			if errors.As(err, &drift) != (want != "") || want == "" && err != nil || want != "" && !strings.HasPrefix(drift.What, want) {
				t.Errorf("%v after %q: %v, want %q", to, step.flush, err, want)
			}
		}
	}
}

// program writes the rules of what a tracker has, and returns their engine.
func program(t *testing.T, c Config, tr *tracker.Tracker) *ruleset.Engine {
	t.Helper()
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
	b := must.Get(New(t.Context(), c))(t)
	t.Cleanup(func() { b.Close() })
	must.Do(t, e.Attach("nftables", b).Sync(t.Context()))
	return e
}
