package ruleset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

// limitedBackend is a recorder with limits.
type limitedBackend struct {
	recorder
	limits Limits
}

func (l *limitedBackend) Limits(tracker.Family) Limits { return l.limits }

// events stores events as text.
type events []string

func (e *events) Event(ref v1.ObjectReference, warning bool, reason, message string) {
	*e = append(*e, fmt.Sprintf("%s/%s %s %v %s: %s", ref.Kind, ref.Name, ref.UID, warning, reason, message))
}

func (e *events) take() []string {
	out := slices.Sorted(slices.Values(*e))
	*e = nil
	return out
}

func worldWithEvents(t *testing.T, log *slog.Logger) (*tracker.Tracker, *Engine, *events) {
	t.Helper()
	e := &events{}
	tr, err := tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: "n1"}, Events: e,
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			if s.Annotations["hash"] != "" {
				p.Hash = tracker.HashSource
			}
			return fromAnnotations(s, nil, p)
		},
		OnEndpoint: func(s *discovery.EndpointSlice, _ *discovery.Endpoint, ep *tracker.Endpoint) error {
			if s.Annotations["weights"] != "" {
				ep.Weight = uint16(ep.Addr.Addr().As4()[3])
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := NewEngine(Config{Source: tr, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return tr, engine, e
}

// TestExceededLimitIsReportedOnce checks that a Service that exceeds a limit is
// reported once until it no longer does, and is offered within the limit.
func TestExceededLimitIsReportedOnce(t *testing.T) {
	var logged bytes.Buffer
	tr, e, ev := worldWithEvents(t, slog.New(slog.NewTextHandler(&logged, nil)))
	b := &limitedBackend{limits: Limits{Affinity: time.Hour, Endpoints: 4, AffinityEndpoints: 3, WeightedEndpoints: 2}}
	c := e.Attach("small", b)
	sticky := func(seconds int32) func(*v1.Service) {
		return func(s *v1.Service) {
			s.UID = "u1"
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
		}
	}
	addresses := func(n int) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprint("10.0.0.", i+1))
		}
		return out
	}
	const prefix = `Service/a u1 true ProxyLimitExceeded: port "p" (IPv4): backend small: `
	step := func(what string, want ...string) {
		t.Helper()
		logged.Reset()
		if err := c.Sync(t.Context()); err != nil && !errors.Is(err, errInjected) {
			t.Fatal(err)
		}
		for i := range want {
			want[i] = prefix + want[i]
		}
		if got := ev.take(); !slices.Equal(got, want) {
			t.Errorf("%s: events %q, want %q", what, got, want)
		}
		if n := strings.Count(logged.String(), "exceeds a limit"); n != len(want) {
			t.Errorf("%s: %d lines, want %d: %s", what, n, len(want), &logged)
		}
		if b.take() == nil {
			t.Errorf("%s: nothing was offered", what)
		}
	}
	tr.SetService(service("a", "172.30.0.1", sticky(3600)))
	tr.SetSlice(slice("a", addresses(3)...))
	step("nothing exceeded")
	tr.SetService(service("a", "172.30.0.1", sticky(7200)))
	tr.SetSlice(slice("a", addresses(2)...))
	b.answer = func(*Delta) error { return errInjected }
	step("affinity", "affinity timeout 2h0m0s is longer than 1h0m0s")
	step("offered again")
	b.answer = nil
	tr.SetSlice(slice("a", addresses(5)...))
	step("endpoints", "5 endpoints are more than 4; 5 endpoints with client affinity are more than 3")
	tr.SetSlice(slice("a", addresses(6)...))
	step("more of them")
	tr.SetSlice(slice("a", addresses(1)...))
	step("few")
	weighted := slice("a", addresses(3)...)
	weighted.Annotations = map[string]string{"weights": "yes"}
	tr.SetSlice(weighted)
	step("weights", "3 endpoints with weights or a hash are more than 2")
	tr.SetSlice(slice("a", addresses(3)...))
	step("no weights")
	tr.SetService(service("a", "172.30.0.1", sticky(60), func(s *v1.Service) { s.Annotations = map[string]string{"hash": "yes"} }))
	tr.SetSlice(slice("a", addresses(4)...))
	step("hash", "4 endpoints with client affinity are more than 3; 4 endpoints with weights or a hash are more than 2")
	c.Resync()
	step("in a full delta")
	tr.DeleteService(name("a"))
	step("deleted")
	tr.SetService(service("a", "172.30.0.1", sticky(7200)))
	step("back", "affinity timeout 2h0m0s is longer than 1h0m0s; 4 endpoints with client affinity are more than 3")
	tr.DeleteService(name("a"))
	step("deleted again")
	tr.SetService(service("a", "172.30.0.1", sticky(7200)))
	step("back again: the same message is not repeated")
}

// TestLimitsAreHeld offers random Services to a backend with random limits and compares what it gets
// with a slow model. A change beyond the limits is not offered.
func TestLimitsAreHeld(t *testing.T) {
	cuts := 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := func() int { return r.IntN(3) * r.IntN(6) }
		b := &limitedBackend{limits: Limits{
			Affinity: time.Duration(r.IntN(3)) * time.Minute, Endpoints: n(), AffinityEndpoints: n(), WeightedEndpoints: n(),
		}}
		tr, e, _ := worldWithEvents(t, nil)
		c := e.Attach("small", b)
		got := map[tracker.Key]*Port{}
		for range 10 {
			for _, name := range []string{"a", "b"} {
				seconds := int32(30 * (1 + r.IntN(5)))
				tr.SetService(service(name, map[string]string{"a": "172.30.0.1", "b": "172.30.0.2"}[name], func(s *v1.Service) {
					s.Annotations = map[string]string{}
					if r.IntN(3) == 0 {
						s.Annotations["hash"] = "x"
					}
					if r.IntN(2) == 0 {
						s.Annotations["local"] = "yes"
					}
					if r.IntN(2) == 0 {
						s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
						s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
					}
				}))
				for _, node := range []string{"n1", "n2"} {
					s := sliceOn(name, node, many(map[string]int{"n1": 1, "n2": 2}[node], 1+r.IntN(8))...)
					if r.IntN(2) == 0 {
						s.Annotations = map[string]string{"weights": "yes"}
					}
					tr.SetSlice(s)
				}
			}
			if err := c.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, d := range b.take() {
				for _, ch := range d.Changes {
					got[ch.Key] = ch.New
				}
			}
			for _, s := range e.Snapshot().Ports {
				want := *s
				within := func(target Target) (out []*tracker.Endpoint) {
					for _, ep := range s.Pool(target) {
						n := len(out) + 1
						sticky, numbered := s.Spec.Affinity != 0, s.Hash() != tracker.HashNone || s.Weighted(target)
						if (b.limits.Endpoints == 0 || n <= b.limits.Endpoints) &&
							(!sticky || b.limits.AffinityEndpoints == 0 || n <= b.limits.AffinityEndpoints) &&
							(!numbered || b.limits.WeightedEndpoints == 0 || n <= b.limits.WeightedEndpoints) {
							out = append(out, ep)
						}
					}
					return out
				}
				want.Selection.Cluster, want.Selection.Local = within(TargetCluster), within(TargetLocal)
				if spec := *s.Spec; b.limits.Affinity != 0 {
					spec.Affinity = min(spec.Affinity, b.limits.Affinity)
					want.Spec = &spec
				}
				in, offered, fields := c.Port(s.Key), got[s.Key], diff(s, &want)
				if f := diff(in, &want); f != 0 || diff(offered, &want) != 0 {
					t.Fatalf("seed %d: %s: got %v, %v, want %v", seed, f, offered, in, &want)
				}
				for _, ep := range in.Selection.Reachable {
					if !slices.Contains(want.Selection.Cluster, ep) && !slices.Contains(want.Selection.Local, ep) {
						t.Fatalf("seed %d: %v is in no pool", seed, ep)
					}
				}
				missing := max(len(s.Selection.Cluster), len(s.Selection.Local)) - max(len(want.Selection.Cluster), len(want.Selection.Local))
				switch left := in.LeftOut; {
				case fields == 0 && in != s, fields != 0 && left == nil, fields != 0 && left.Endpoints != missing:
					t.Fatalf("seed %d: %s differ, left out %+v", seed, fields, left)
				case fields != 0:
					cuts++
				}
			}
			// Nothing is offered that the limits hide.
			e.mu.Lock()
			for id := range c.states {
				c.markDirty(uint32(id))
			}
			e.mu.Unlock()
			if err := c.Sync(t.Context()); err != nil || b.take() != nil {
				t.Fatalf("seed %d: an unchanged Service was offered: %v", seed, err)
			}
		}
	}
	if cuts < 1000 {
		t.Errorf("only %d Services exceeded a limit", cuts)
	}
}

// TestIgnoredPartsAreReported gives a data plane that ignores everything it may ignore each part
// of a Service in turn.
func TestIgnoredPartsAreReported(t *testing.T) {
	all := LacksSourceRanges | LacksAffinityTimeout | LacksWeights | LacksHash | LacksEndpointPorts
	port := func(edit func(*tracker.ServicePort)) *tracker.ServicePort {
		p := &tracker.ServicePort{Key: tracker.Key{Family: tracker.IPv4}, ClusterIP: netip.MustParseAddr("172.30.0.1"), Port: 80}
		edit(p)
		return p
	}
	endpoint := func(at string, weight uint16) *tracker.Endpoint {
		return &tracker.Endpoint{Addr: netip.MustParseAddrPort(at), Ready: true, Serving: true, Weight: weight}
	}
	same := []*tracker.Endpoint{endpoint("10.0.0.1:80", 1), endpoint("10.0.0.2:80", 1)}
	for want, state := range map[Lacks]tracker.PortState{
		0: {Port: port(func(*tracker.ServicePort) {}), Endpoints: same},
		LacksSourceRanges: {Port: port(func(p *tracker.ServicePort) {
			p.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
		}), Endpoints: same},
		LacksAffinityTimeout: {Port: port(func(p *tracker.ServicePort) { p.Affinity = time.Hour }), Endpoints: same},
		LacksHash:            {Port: port(func(p *tracker.ServicePort) { p.Hash = tracker.HashSource }), Endpoints: same},
		LacksWeights:         {Port: port(func(*tracker.ServicePort) {}), Endpoints: []*tracker.Endpoint{same[0], endpoint("10.0.0.2:80", 2)}},
		LacksEndpointPorts:   {Port: port(func(*tracker.ServicePort) {}), Endpoints: []*tracker.Endpoint{same[0], endpoint("10.0.0.2:81", 1)}},
	} {
		s := Compile(state, &Node{})
		l := Limits{Lacks: all}
		if got := all.in(s); got != want {
			t.Errorf("%b is ignored, want %b", got, want)
		}
		x, news := l.exceeded(s, 0)
		if (x != 0) != (want != 0) || len(news) > 1 || len(news) == 0 && want != 0 {
			t.Errorf("%b: %q", want, news)
		}
		if _, news := l.exceeded(s, x); news != nil {
			t.Errorf("%b: %q although that is known", want, news)
		}
		l.Lacks &^= want
		if x, news := l.exceeded(s, 0); x != 0 || news != nil {
			t.Errorf("%b: %q although nothing of it is ignored", want, news)
		}
	}
}

// TestConflictEvents checks that the Service that loses a frontend gets an event.
func TestConflictEvents(t *testing.T) {
	tr, e, ev := worldWithEvents(t, nil)
	c := e.Attach("b", discard)
	wants := func(s *v1.Service) {
		s.UID = "u" + s.UID
		s.Spec.ExternalIPs = []string{"192.0.2.1"}
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = 30080
	}
	for _, x := range []struct {
		name, ip string
		want     []string
	}{
		{"m", "172.30.0.1", nil},
		{"z", "172.30.0.2", []string{
			`Service/z u true ProxyFrontendConflict: port "p" (IPv4): external IP 192.0.2.1 port 80 (TCP) belongs to default/m:p/TCP/IPv4`,
			`Service/z u true ProxyFrontendConflict: port "p" (IPv4): node port 30080 (TCP) belongs to default/m:p/TCP/IPv4`,
		}},
		{"a", "172.30.0.3", []string{
			`Service/m u true ProxyFrontendConflict: port "p" (IPv4): external IP 192.0.2.1 port 80 (TCP) belongs to default/a:p/TCP/IPv4`,
			`Service/m u true ProxyFrontendConflict: port "p" (IPv4): node port 30080 (TCP) belongs to default/a:p/TCP/IPv4`,
		}},
	} {
		tr.SetService(service(x.name, x.ip, wants))
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := ev.take(); !slices.Equal(got, x.want) {
			t.Errorf("after %s: events\n%s\nwant\n%s", x.name, strings.Join(got, "\n"), strings.Join(x.want, "\n"))
		}
	}
}

// TestSyncInfoCounts checks the numbers of a Sync, of Services in one and in both families.
func TestSyncInfoCounts(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	fail := map[tracker.Key]error{}
	c := e.Attach("b", BackendFunc(func(context.Context, *Delta) error {
		if len(fail) != 0 {
			return &PartialError{Failed: fail}
		}
		return nil
	}))
	var info SyncInfo
	c.OnSync(func(i SyncInfo) { info = i })
	step := func(what string, want [5]int) {
		t.Helper()
		_ = c.Sync(t.Context())
		if got := [5]int{info.Changes, info.Failed, info.Services, info.Ports, info.Endpoints}; got != want {
			t.Errorf("%s: %d changes, failed, Services, ports and endpoints, want %d", what, got, want)
		}
	}
	both := func(s *v1.Service) {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00::1")
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPv6Protocol)
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "q", Port: 81, Protocol: v1.ProtocolTCP})
	}
	tr.SetService(service("a", "172.30.0.1", both))
	tr.SetService(service("b", "172.30.0.2"))
	tr.SetService(service("c", "fd00::9"))
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	tr.SetSlice(slice("c", "fd01::1"))
	fail[key("c", tracker.IPv6)] = errInjected
	step("first", [5]int{6, 1, 3, 6, 3})
	clear(fail)
	step("again", [5]int{1, 0, 3, 6, 3})
	tr.SetService(service("a", "172.30.0.1"))
	step("one family less", [5]int{3, 0, 3, 3, 3})
	tr.DeleteService(name("a"))
	tr.DeleteService(name("b"))
	tr.DeleteService(name("c"))
	step("nothing left", [5]int{3, 0, 0, 0, 0})
}
