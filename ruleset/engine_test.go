package ruleset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// recorder is a backend that stores its deltas and returns the configured errors.
type recorder struct {
	deltas []*Delta
	answer func(*Delta) error
}

func (r *recorder) Apply(_ context.Context, d *Delta) error {
	r.deltas = append(r.deltas, d)
	if r.answer != nil {
		return r.answer(d)
	}
	return nil
}

// take returns the deltas since the previous take.
func (r *recorder) take() []*Delta {
	d := r.deltas
	r.deltas = nil
	return d
}

func name(s string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: s}
}

func TestInvalidEngineConfigIsRejected(t *testing.T) {
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "n1"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		c    Config
		ok   bool
	}{
		{"nothing", Config{}, false},
		{"only a tracker", Config{Source: tr}, true},
		{"two ways to detect", Config{Source: tr, LocalTraffic: LocalTraffic{Bridge: "cni0", CIDRs: prefixes("10.0.0.0/8")}}, false},
		{"two more", Config{Source: tr, LocalTraffic: LocalTraffic{Bridge: "cni0", InterfacePrefix: "veth"}}, false},
		{"a long name", Config{Source: tr, LocalTraffic: LocalTraffic{Bridge: "a234567890123456"}}, false},
		{"the longest name", Config{Source: tr, LocalTraffic: LocalTraffic{Bridge: "a23456789012345"}}, true},
		{"an invalid Service CIDR", Config{Source: tr, ServiceCIDRs: make([]netip.Prefix, 1)}, false},
		{"an invalid pod range", Config{Source: tr, LocalTraffic: LocalTraffic{CIDRs: make([]netip.Prefix, 1)}}, false},
	} {
		_, err := NewEngine(c.c)
		if c.ok != (err == nil) || err != nil && !errors.Is(err, ErrConfig) {
			t.Errorf("%s: error %v", c.name, err)
		}
	}
}

// feed is a [Source] that returns made-up updates.
type feed struct {
	updates []tracker.Update
	events  []string
}

func (*feed) Missing() []tracker.Kind     { return nil }
func (*feed) Node() tracker.NodeInfo      { return tracker.NodeInfo{} }
func (*feed) Notify(func()) (end func())  { return func() {} }
func (f *feed) Take() (c tracker.Changes) { c.Updates, f.updates = f.updates, nil; return c }
func (f *feed) Event(s types.NamespacedName, _ bool, reason tracker.Reason, message string) {
	f.events = append(f.events, fmt.Sprintf("%s: %s: %s", s, reason, message))
}

// TestIncompletePortsAreRefused checks that an update without a Port or with a nil endpoint
// costs no other port its rules, and that the port is served after a complete update.
func TestIncompletePortsAreRefused(t *testing.T) {
	state := func(port string, eps ...*tracker.Endpoint) tracker.PortState {
		k := key("a", tracker.IPv4)
		k.Port = port
		return tracker.PortState{Port: &tracker.ServicePort{Key: k, ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: uint16(port[0])}, Endpoints: eps}
	}
	ep := endpoint("10.0.0.1:8080", "n1")
	f := &feed{updates: []tracker.Update{{Name: name("a"), Ports: []tracker.PortState{
		state("p", ep), state("q", ep, nil), {Endpoints: []*tracker.Endpoint{ep}},
	}}}}
	e, err := NewEngine(Config{Source: f})
	if err != nil {
		t.Fatal(err)
	}
	if got := e.Snapshot().Ports; len(got) != 1 || got[0].Key.Port != "p" {
		t.Errorf("compiled %v", got)
	}
	want := []string{
		`default/a: ProxyInvalidObject: port "q" (IPv4): nil endpoint`,
		`default/a: ProxyInvalidObject: port without a ServicePort`,
	}
	if !slices.Equal(f.events, want) {
		t.Errorf("events %q, want %q", f.events, want)
	}
	f.updates = []tracker.Update{{Name: name("a"), Ports: []tracker.PortState{state("p", ep), state("q", ep)}}}
	if got := e.Snapshot().Ports; len(got) != 2 {
		t.Errorf("compiled %v", got)
	}
}

// TestNothingIsOfferedBeforeSync checks that the first delta has everything and comes
// after all sources are synced.
func TestNothingIsOfferedBeforeSync(t *testing.T) {
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "n1"}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := NewEngine(Config{Source: tr})
	if err != nil {
		t.Fatal(err)
	}
	notified := 0
	e.Notify(func() { notified++ })
	b := &recorder{}
	c := e.Attach("b", b)
	tr.SetService(service("a", "172.30.0.1"))
	tr.MarkSynced(tracker.KindServices)
	for range 2 {
		if err := c.Sync(t.Context()); !errors.Is(err, ErrNotSynced) || InEffect(err) ||
			!strings.Contains(err.Error(), "sync b") || !strings.Contains(err.Error(), "[Slices Nodes]") {
			t.Fatalf("sync before the sources are synced: %v", err)
		}
	}
	if len(b.deltas) != 0 || notified != 0 || len(e.Snapshot().Ports) != 0 {
		t.Fatalf("before the sources are synced: %d deltas, %d notifications", len(b.deltas), notified)
	}
	tr.MarkSynced(tracker.KindSlices, tracker.KindNodes)
	if notified != 1 {
		t.Fatalf("%d notifications", notified)
	}
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	d := b.take()
	if len(d) != 1 || !d[0].Full || len(d[0].Changes) != 1 || d[0].OldNode != nil || d[0].Node == nil {
		t.Fatalf("first: %+v", d)
	}
	// The first delta is offered without any Service too, so that the backend removes stale entries.
	empty := &recorder{}
	tr.DeleteService(name("a"))
	if err := e.Attach("empty", empty).Sync(t.Context()); err != nil || len(empty.deltas) != 1 || !empty.deltas[0].Full {
		t.Fatalf("empty: %v %+v", err, empty.deltas)
	}
}

func TestUnchangedRulesetIsNotOffered(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	b := &recorder{}
	c := e.Attach("b", b)
	var infos []SyncInfo
	c.OnSync(func(i SyncInfo) { infos = append(infos, i) })
	sync := func() {
		t.Helper()
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	sync()
	sync()
	// A change that is reverted.
	tr.SetSlice(slice("a", "10.0.0.1"))
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	sync()
	tr.SetSlice(slice("a", "10.0.0.1"))
	e.Snapshot() // compiles the change
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	sync()
	tr.SetService(service("b", "172.30.0.2"))
	e.Snapshot()
	tr.DeleteService(name("b"))
	sync()
	if d := b.take(); len(d) != 1 {
		t.Errorf("offered %d deltas, the last with %+v", len(d), d[len(d)-1].Changes)
	}
	e.SetServiceCIDRs(prefixes("172.30.0.0/16"), nil)
	sync()
	e.SetServiceCIDRs(prefixes("172.30.9.9/16"), nil)
	sync()
	d := b.take()
	if len(d) != 1 || d[0].Node == d[0].OldNode || len(d[0].Changes) != 0 || !slices.Equal(d[0].Node.ServiceCIDRs, prefixes("172.30.0.0/16")) {
		t.Errorf("Service CIDRs: %d deltas", len(d))
	}
	c.Resync()
	sync()
	if d := b.take(); len(d) != 1 || !d[0].Full || len(d[0].Changes) != 1 || d[0].Changes[0].Fields != FieldAll || d[0].Changes[0].Old == nil {
		t.Errorf("resync: %+v", d)
	}
	var got strings.Builder
	for _, i := range infos {
		fmt.Fprintf(&got, "applied %v full %v changes %d services %d ports %d endpoints %d\n", i.Applied, i.Full, i.Changes, i.Services, i.Ports, i.Endpoints)
	}
	idle := "applied false full false changes 0 services 1 ports 1 endpoints 2\n"
	want := "applied true full true changes 1 services 1 ports 1 endpoints 2\n" + strings.Repeat(idle, 4) +
		"applied true full false changes 0 services 1 ports 1 endpoints 2\n" + idle +
		"applied true full true changes 1 services 1 ports 1 endpoints 2\n"
	if got.String() != want {
		t.Errorf("OnSync got\n%swant\n%s", got.String(), want)
	}
}

func TestFailedChangesAreOfferedAgain(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	b := &recorder{}
	c := e.Attach("bee", b)
	for _, s := range []string{"a", "b"} {
		tr.SetService(service(s, "172.30.0."+fmt.Sprint(s[0])))
		tr.SetSlice(slice(s, "10.0.0.1"))
	}
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.take()
	boom := errors.New("boom")

	b.answer = func(*Delta) error {
		return &PartialError{Failed: map[tracker.Key]error{key("a", tracker.IPv4): boom, key("zzz", tracker.IPv4): boom}}
	}
	tr.SetSlice(slice("a", "10.0.0.2"))
	err := c.Sync(t.Context())
	var partial *PartialError
	if !errors.As(err, &partial) || !errors.Is(err, boom) || !strings.Contains(err.Error(), "bee") {
		t.Fatalf("error %v", err)
	}
	b.take()

	// A backend that needs the full state gets it once.
	calls := 0
	b.answer = func(d *Delta) error {
		if calls++; calls == 1 {
			return fmt.Errorf("table is gone: %w", ErrNeedFull)
		}
		return nil
	}
	tr.SetSlice(slice("b", "10.0.0.7"))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	d := b.take()
	if len(d) != 2 || d[0].Full || !d[1].Full || len(d[1].Changes) != 2 {
		t.Errorf("after ErrNeedFull: %d deltas", len(d))
	}
	b.answer = func(d *Delta) error { return ErrNeedFull }
	c.Resync()
	if err := c.Sync(t.Context()); !errors.Is(err, ErrNeedFull) || len(b.take()) != 2 {
		t.Errorf("always ErrNeedFull: %v", err)
	}
	b.answer = nil
	if err := c.Sync(t.Context()); err != nil || !b.take()[0].Full {
		t.Errorf("then: %v", err)
	}

	// A context that is done is not a failure of the backend.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	tr.DeleteService(name("b"))
	if err := c.Sync(ctx); !errors.Is(err, context.Canceled) || len(b.take()) != 0 {
		t.Errorf("canceled: %v", err)
	}
	if err := c.Sync(t.Context()); err != nil || len(b.take()) != 1 {
		t.Errorf("after canceled: %v", err)
	}
}

// TestFailedServiceIsOfferedAloneAfterAFullDelta fails full deltas, in part and as a whole. A Service that
// failed, and a Service that was never in effect and is gone, are offered again.
func TestFailedServiceIsOfferedAloneAfterAFullDelta(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	b := &recorder{}
	c := e.Attach("b", b)
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetService(service("b", "172.30.0.2"))
	partial := &PartialError{Failed: map[tracker.Key]error{key("a", tracker.IPv4): errInjected}}
	for i, step := range []struct {
		do     func()
		answer error
		want   string
	}{
		{nil, errInjected, "full a b"},
		{nil, partial, "full a b"},
		{nil, partial, "a"},
		{c.Resync, errInjected, "full a b"},
		{nil, fmt.Errorf("%w, %w", partial, ErrNeedFull), "full a b, full a b"},
		{nil, partial, "full a b"},
		{func() { tr.DeleteService(name("a")) }, errInjected, "a gone"},
		{nil, nil, "a gone"},
		{nil, nil, ""},
	} {
		if step.do != nil {
			step.do()
		}
		b.answer = func(*Delta) error { return step.answer }
		if err := c.Sync(t.Context()); (err == nil) != (step.answer == nil) {
			t.Fatal(err)
		}
		checkInvariants(t, c)
		var got []string
		for _, d := range b.take() {
			var text []string
			if d.Full {
				text = append(text, "full")
			}
			for _, ch := range d.Changes {
				text = append(text, ch.Key.Name)
				if ch.Fields != FieldAll || ch.ID() == 0 || ch.Old != nil != (ch.Key.Name == "b" && i > 1) {
					t.Errorf("step %d: change %+v", i, ch)
				}
				if ch.New == nil {
					text = append(text, "gone")
				}
			}
			got = append(got, strings.Join(text, " "))
		}
		if got := strings.Join(got, ", "); got != step.want {
			t.Fatalf("step %d: deltas %q, want %q", i, got, step.want)
		}
	}
	if len(e.gone) != 0 {
		t.Errorf("%d Services are left", len(e.gone))
	}
}

// TestFailingServiceCostsOthersNothing changes 1,000 Services while another one always fails. Each change is
// offered once, no delta is Full, and the one that fails is offered at most once in each delta.
func TestFailingServiceCostsOthersNothing(t *testing.T) {
	for _, most := range []int{0, 100} {
		tr, e, _ := budgeted(t, Budget{Delta: most})
		fail, offered, deltas := false, map[string]int{}, 0
		c := e.Attach("b", BackendFunc(func(_ context.Context, d *Delta) error {
			if deltas++; fail && d.Full {
				t.Error("a full delta")
			}
			for _, ch := range d.Changes {
				offered[ch.Key.Name]++
			}
			if fail {
				return &PartialError{Failed: map[tracker.Key]error{key("fails", tracker.IPv4): errInjected}}
			}
			return nil
		}))
		const others = 1000
		set := func(network int) {
			for i := range others {
				tr.SetSlice(slice(fmt.Sprint("s", i), fmt.Sprintf("10.%d.%d.%d", network, i/250, i%250+1)))
			}
			tr.SetSlice(slice("fails", fmt.Sprintf("10.%d.9.1", network)))
		}
		for i := range others {
			tr.SetService(service(fmt.Sprint("s", i), fmt.Sprintf("172.30.%d.%d", i/250, i%250+1)))
		}
		tr.SetService(service("fails", "172.30.9.1"))
		set(1)
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		fail = true
		for round := range 3 {
			clear(offered)
			deltas = 0
			for set(2 + round); len(offered) <= others && deltas < others; {
				if err := c.Sync(t.Context()); !errors.Is(err, errInjected) {
					t.Fatal(err)
				}
				checkInvariants(t, c)
			}
			if n := offered["fails"]; n == 0 || n > deltas || deltas > 40 || most == 0 && deltas != 1 {
				t.Errorf("delta size %d: it was offered %d times in %d deltas", most, n, deltas)
			}
			delete(offered, "fails")
			for name, n := range offered {
				if n != 1 {
					t.Errorf("delta size %d: %s was offered %d times", most, name, n)
				}
			}
			if len(offered) != others {
				t.Errorf("delta size %d: %d of the others were offered", most, len(offered))
			}
		}
	}
}

// TestSyncWithinApplyEndsWithItsContext calls Sync in Apply of the same Cursor.
func TestSyncWithinApplyEndsWithItsContext(t *testing.T) {
	_, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	ctx, cancel := context.WithCancel(t.Context())
	var c *Cursor
	c = e.Attach("b", BackendFunc(func(ctx context.Context, _ *Delta) error {
		if ctx.Done() == nil {
			return nil
		}
		cancel()
		return c.Sync(ctx)
	}))
	if err := c.Sync(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if err := c.Sync(context.Background()); err != nil {
		t.Errorf("next Sync: %v", err)
	}
}

func TestTriggersAreAcknowledged(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	b := &recorder{}
	c := e.Attach("b", b)
	var acked []string
	c.OnSync(func(i SyncInfo) {
		acked = nil
		for _, tr := range i.Triggers {
			acked = append(acked, fmt.Sprint(tr.Service.Name, len(tr.Times)))
		}
	})
	set := func(s, addr, at string) {
		sl := slice(s, addr)
		sl.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: at}
		tr.SetSlice(sl)
	}
	for _, s := range []string{"a", "b"} {
		tr.SetService(service(s, "172.30.0."+fmt.Sprint(s[0])))
	}
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	set("a", "10.0.0.1", "2096-01-02T03:04:05Z")
	set("b", "10.0.0.1", "2096-01-02T03:04:06Z")
	b.answer = func(*Delta) error { return errInjected }
	for range 2 {
		b.take()
		if err := c.Sync(t.Context()); err == nil || len(acked) != 0 {
			t.Fatal("no error, or triggers acknowledged")
		}
		if got := b.deltas[0].Triggers; len(got) != 2 {
			t.Fatalf("triggers %v", got)
		}
	}
	b.answer = func(*Delta) error {
		set("b", "10.0.0.2", "2096-01-02T03:04:07Z")
		e.Snapshot()
		return &PartialError{Failed: map[tracker.Key]error{key("a", tracker.IPv4): errInjected}}
	}
	if err := c.Sync(t.Context()); err == nil || !slices.Equal(acked, []string{"b1"}) {
		t.Fatalf("error %v, acknowledged %v", err, acked)
	}
	b.answer = nil
	if err := c.Sync(t.Context()); err != nil || !slices.Equal(acked, []string{"a1", "b1"}) {
		t.Fatalf("error %v, acknowledged %v", err, acked)
	}
	if err := c.Sync(t.Context()); err != nil || len(acked) != 0 {
		t.Fatalf("error %v, acknowledged %v", err, acked)
	}
}

func TestDetachDuringApply(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var c *Cursor
	c = e.Attach("b", BackendFunc(func(context.Context, *Delta) error {
		c.Detach()
		c.Detach()
		return nil
	}))
	tr.SetService(service("a", "172.30.0.1"))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Sync(t.Context()); !errors.Is(err, ErrDetached) {
		t.Errorf("error %v", err)
	}
	tr.DeleteService(name("a"))
	e.Snapshot()
	if len(e.free) != 1 || len(e.gone) != 0 {
		t.Errorf("%d ids free, %d keys gone", len(e.free), len(e.gone))
	}
}

// TestConflictsHaveOneOwner follows one address through every Service that asks for
// it.
func TestConflictsHaveOneOwner(t *testing.T) {
	var logged bytes.Buffer
	tr, e := world(t, Config{Log: slog.New(slog.NewTextHandler(&logged, nil))}, tracker.NodeInfo{Name: "n1"})
	external := func(ip string, nodePort int32) func(*v1.Service) {
		return func(s *v1.Service) {
			s.Spec.ExternalIPs = []string{ip}
			if nodePort != 0 {
				s.Spec.Type = v1.ServiceTypeNodePort
				s.Spec.Ports[0].NodePort = nodePort
			}
		}
	}
	who := func() string {
		t.Helper()
		var out []string
		s := e.Snapshot()
		for _, at := range []string{"192.0.2.1:80", "172.30.0.9:80", "0.0.0.0:30080"} {
			owner := "-"
			n := 0
			for _, svc := range s.Ports {
				for i := range svc.Frontends {
					if p := l4KeyOf(svc, &svc.Frontends[i]); netip.AddrPortFrom(netip.AddrFrom16(p.addr).Unmap(), p.port).String() == at {
						owner = svc.Key.Name
						n++
					}
				}
			}
			if n > 1 {
				t.Errorf("%s belongs to %d services", at, n)
			}
			out = append(out, owner)
		}
		return strings.Join(out, " ")
	}
	for _, step := range []struct {
		what func()
		want string
		logs int
	}{
		{func() { tr.SetService(service("m", "172.30.0.1", external("192.0.2.1", 30080))) }, "m - m", 0},
		{func() { tr.SetService(service("z", "172.30.0.2", external("192.0.2.1", 30080))) }, "m - m", 2},
		{func() { tr.SetSlice(slice("z", "10.0.0.1")) }, "m - m", 0}, // the same conflict is logged once
		{func() { tr.SetService(service("a", "172.30.0.3", external("192.0.2.1", 30080))) }, "a - a", 2},
		{func() { tr.DeleteService(name("m")) }, "a - a", 0},
		{func() { tr.DeleteService(name("a")) }, "z - z", 0},
		{func() { tr.SetService(service("z", "172.30.0.2")) }, "- - -", 0},
		// An external IP never takes another Service's cluster IP, whatever the names.
		{func() { tr.SetService(service("a", "172.30.0.3", external("172.30.0.9", 0))) }, "- a -", 0},
		{func() { tr.SetService(service("z", "172.30.0.9")) }, "- z -", 1},
		{func() { tr.SetService(service("a", "172.30.0.3", external("172.30.0.9", 30080))) }, "- z a", 0}, // the same message
		{func() { tr.DeleteService(name("z")) }, "- a a", 0},
	} {
		logged.Reset()
		step.what()
		if got := who(); got != step.want {
			t.Errorf("frontends belong to %q, want %q", got, step.want)
		}
		if n := strings.Count(logged.String(), "another service owns"); n != step.logs {
			t.Errorf("%q: %d messages, want %d: %s", step.want, n, step.logs, &logged)
		}
		if strings.Contains(logged.String(), "invalid") {
			t.Errorf("%q: a NodePort has no address: %s", step.want, &logged)
		}
	}
}

// TestPortsOfTheNodeHaveOneOwner has Services of different age that use port 30080 at the node's address: as NodePort,
// as health-check node port, and with an external or load-balancer IP.
func TestPortsOfTheNodeHaveOneOwner(t *testing.T) {
	var logged bytes.Buffer
	here := tracker.NodeInfo{Name: "n1", Addresses: addrs("192.0.2.1", "2001:db8::1")}
	elsewhere := tracker.NodeInfo{Name: "n1", Addresses: addrs("192.0.2.2")}
	tr, e := world(t, Config{Log: slog.New(slog.NewTextHandler(&logged, nil))}, here)
	set := func(name string, created int64, kind string) func() {
		return func() {
			s := service(name, fmt.Sprint("172.30.0.", name[0]))
			s.CreationTimestamp = metav1.Unix(created, 0)
			s.Spec.Ports[0].Port = 30080
			switch kind {
			case "node port":
				s.Spec.Type, s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, 80, 30080
			case "external":
				s.Spec.ExternalIPs = []string{"192.0.2.1"}
			case "load balancer":
				s.Spec.Type, s.Status.LoadBalancer.Ingress = v1.ServiceTypeLoadBalancer, []v1.LoadBalancerIngress{{IP: "192.0.2.1"}}
			case "check":
				s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal, 30080
				s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: 80}, {Name: "q", Port: 81}}
			}
			tr.SetService(s)
		}
	}
	gone := func(name string) func() {
		return func() { tr.DeleteService(types.NamespacedName{Namespace: "default", Name: name}) }
	}
	// who returns the Services that use the port, with the number of uses.
	who := func() string {
		uses := map[string]int{}
		for _, p := range e.Snapshot().Ports {
			if p.Spec.HealthCheckNodePort != 0 {
				uses[p.Key.Name]++
			}
			for _, f := range p.Frontends {
				if f.Kind != KindClusterIP && f.Port == 30080 {
					uses[p.Key.Name]++
				}
			}
		}
		return fmt.Sprint(uses)
	}
	for i, step := range []struct {
		do   func()
		want string
		log  string
	}{
		// A younger external IP takes nothing, whichever comes first.
		{set("x", 2000, "external"), "map[x:1]", ""},
		{set("n", 1000, "node port"), "map[n:1]", `frontend="external IP 192.0.2.1 port 30080 (TCP)" winner=default/n:p/TCP/IPv4`},
		{set("x", 2000, "load balancer"), "map[n:1]", `frontend="load-balancer IP 192.0.2.1 port 30080 (TCP)" winner=default/n:p/TCP/IPv4`},
		{func() { tr.SetNode(elsewhere) }, "map[n:1 x:1]", ""},
		{func() { tr.SetNode(here) }, "map[n:1]", ""}, // reported before
		{gone("n"), "map[x:1]", ""},
		// An older one takes the NodePort at that address only.
		{set("n", 3000, "node port"), "map[n:1 x:1]", `frontend="node port 30080 (TCP) at an address of the node" winner=default/x:p/TCP/IPv4`},
		{set("c", 4000, "check"), "map[n:1 x:1]", `frontend="health-check node port 30080" winner=default/n:p/TCP/IPv4`},
		{gone("n"), "map[c:2 x:1]", `frontend="health-check node port 30080 at an address of the node" winner=default/x:p/TCP/IPv4`},
		// An older health-check node port wins over the others, with all ports of its Service.
		{set("c", 1000, "check"), "map[c:2]", `frontend="load-balancer IP 192.0.2.1 port 30080 (TCP)" winner=default/c:p/TCP/IPv4`},
		{set("d", 2000, "check"), "map[c:2]", `frontend="health-check node port 30080" winner=default/c:p/TCP/IPv4`},
		{set("n", 3000, "node port"), "map[c:2]", `frontend="node port 30080 (TCP)" winner=default/c:p/TCP/IPv4`},
		{gone("c"), "map[d:2]", ""},
		{gone("d"), "map[n:1 x:1]", ""},
		{gone("n"), "map[x:1]", ""},
	} {
		logged.Reset()
		step.do()
		if got := who(); got != step.want {
			t.Errorf("step %d: %s, want %s", i, got, step.want)
		}
		if (step.log == "") != (logged.Len() == 0) || !strings.Contains(logged.String(), step.log) {
			t.Errorf("step %d: logged %q, want %q", i, &logged, step.log)
		}
	}
	gone("x")()
	e.Snapshot()
	if n := len(e.uses.owner) + len(e.uses.conflicts); n != 0 {
		t.Errorf("%d uses are left", n)
	}
}

// TestCreationTimeAloneIsNoChange recreates a Service that conflicts with nothing. No
// backend hears of it.
func TestCreationTimeAloneIsNoChange(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	changes := 0
	c := e.Attach("b", BackendFunc(func(_ context.Context, d *Delta) error { changes += len(d.Changes); return nil }))
	for _, created := range []int64{1000, 2000, 0} {
		tr.SetService(service("a", "172.30.0.1", func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(created, 0) }))
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if changes != 1 {
		t.Errorf("%d changes, want 1", changes)
	}
}

// TestNilArguments passes nil where a caller may by mistake. Nothing may panic later, when
// locks are held.
func TestNilArguments(t *testing.T) {
	_, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	e.Notify(nil)
	if (*Port)(nil).HasPool(TargetCluster) {
		t.Error("a nil Port has a pool")
	}
	e.SetServiceCIDRs(prefixes("172.30.0.0/16"), nil)
	e.Snapshot()
}
