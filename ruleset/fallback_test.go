package ruleset

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// TestRefusedServiceKeepsWhatMayStay refuses a Service whose endpoints change, and that takes a
// NodePort from another one. The same Sync offers what may stay of both, and the next one offers
// the wanted versions again.
func TestRefusedServiceKeepsWhatMayStay(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var deltas []string
	refused := map[tracker.Key]error{}
	c := e.Attach("plane", BackendFunc(func(_ context.Context, d *Delta) error {
		var lines []string
		failed := map[tracker.Key]error{}
		for _, ch := range d.Changes {
			if refused[ch.Key] != nil && !d.second {
				failed[ch.Key] = refused[ch.Key]
			}
			text := ch.Key.Name
			if ch.New == nil {
				text += " removed"
			} else {
				for _, ep := range ch.New.Selection.Reachable {
					text += " " + ep.Addr.Addr().String()
				}
				for _, f := range ch.New.Frontends {
					if f.Kind == KindNodePort {
						text += fmt.Sprint(" ", f.Port)
					}
				}
			}
			lines = append(lines, text)
		}
		deltas = append(deltas, strings.Join(lines, ", "))
		if len(failed) != 0 {
			return &PartialError{Failed: failed, Pruned: true}
		}
		return nil
	}))
	set := func(name, ip string, nodePort int32, created int64, eps ...string) {
		tr.SetService(service(name, ip, func(s *v1.Service) {
			s.CreationTimestamp = metav1.Unix(created, 0)
			if s.Spec.Type = v1.ServiceTypeNodePort; nodePort == 0 {
				s.Spec.Type = v1.ServiceTypeClusterIP
			}
			s.Spec.Ports[0].NodePort = nodePort
		}))
		tr.SetSlice(slice(name, eps...))
	}
	sync := func(wantErr error, want ...string) {
		t.Helper()
		deltas = nil
		if err := c.Sync(t.Context()); !errors.Is(err, wantErr) || err != nil && !InEffect(err) {
			t.Fatalf("error %v, want %v", err, wantErr)
		}
		if !slices.Equal(deltas, want) {
			t.Errorf("deltas %q, want %q", deltas, want)
		}
	}
	set("a", "172.30.0.1", 0, 1, "10.0.0.1", "10.0.0.2")
	set("b", "172.30.0.2", 30001, 2, "10.0.1.1")
	sync(nil, "a 10.0.0.1 10.0.0.2, b 10.0.1.1 30001")

	a := key("a", tracker.IPv4)
	refused[a] = fmt.Errorf("full: %w", ErrRefused)
	set("a", "172.30.0.1", 30001, 1, "10.0.0.2", "10.0.0.3")
	sync(ErrRefused, "a 10.0.0.2 10.0.0.3 30001, b 10.0.1.1", "a 10.0.0.2")
	set("a", "172.30.0.1", 30001, 1, "10.0.0.1", "10.0.0.3") // one that it had returns
	sync(ErrRefused, "a 10.0.0.1 10.0.0.3 30001, b 10.0.1.1", "a 10.0.0.1")
	set("a", "172.30.0.1", 30001, 1, "10.0.0.2", "10.0.0.3")
	sync(ErrRefused, "a 10.0.0.2 10.0.0.3 30001, b 10.0.1.1", "a 10.0.0.2")
	set("b", "172.30.0.2", 30001, 2, "10.0.1.2")
	sync(ErrRefused, "a 10.0.0.2 10.0.0.3 30001, b 10.0.1.2", "b 10.0.1.2 30001")
	sync(ErrRefused, "a 10.0.0.2 10.0.0.3 30001, b 10.0.1.2")

	// The one that was to lose the NodePort is deleted while the other is refused.
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "b"})
	sync(ErrRefused, "a 10.0.0.2 10.0.0.3 30001, b removed", "b removed")
	if c.Port(key("b", tracker.IPv4)) != nil || len(e.gone) != 0 {
		t.Error("the deleted Service is left")
	}
	delete(refused, a)
	sync(nil, "a 10.0.0.2 10.0.0.3 30001")

	// A new Service that is refused and deleted leaves nothing.
	b := key("b", tracker.IPv4)
	refused[b] = ErrRefused
	set("b", "172.30.0.2", 30002, 2, "10.0.1.1")
	sync(ErrRefused, "b 10.0.1.1 30002")
	sync(ErrRefused, "b 10.0.1.1 30002")
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "b"})
	sync(nil)
	if len(e.gone) != 0 || len(e.free) != len(e.slots)-2 {
		t.Errorf("%d Services are left, %d of %d IDs are free", len(e.gone), len(e.free), len(e.slots)-2)
	}
}

// TestRefusalLeavesNoAttempt refuses a whole delta, one that follows a refusal, and a Service in a
// full delta that has removed stale entries. Old is what is in effect after each, and what may stay
// is offered again.
func TestRefusalLeavesNoAttempt(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var deltas []string
	var answers []error
	c := e.Attach("plane", BackendFunc(func(_ context.Context, d *Delta) error {
		for _, ch := range d.Changes {
			text := ch.Key.Name
			for _, s := range []*Port{ch.Old, ch.New} {
				text += " >"
				if s != nil {
					for _, ep := range s.Selection.Reachable {
						text += " " + ep.Addr.Addr().String()
					}
				}
			}
			if d.Full {
				text = "full: " + text
			}
			if n := len(ch.Attempted); n != 0 {
				text += fmt.Sprintf(", %d attempted", n)
			}
			deltas = append(deltas, text)
		}
		err := answers[0]
		answers = answers[1:]
		return err
	}))
	locked := fmt.Errorf("locked: %w", ErrRefused)
	refused := func(pruned bool) error {
		return &PartialError{Failed: map[tracker.Key]error{key("a", tracker.IPv4): fmt.Errorf("full: %w", ErrRefused)}, Pruned: pruned, Restored: pruned}
	}
	sync := func(inEffect bool, from []error, want ...string) {
		t.Helper()
		deltas, answers = nil, from
		if err := c.Sync(t.Context()); InEffect(err) != inEffect {
			t.Errorf("error %v", err)
		}
		if !slices.Equal(deltas, want) || len(answers) != 0 {
			t.Errorf("deltas %q, want %q", deltas, want)
		}
	}
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	sync(true, []error{nil}, "full: a > > 10.0.0.1 10.0.0.2")
	tr.SetSlice(slice("a", "10.0.0.2", "10.0.0.3"))
	wanted, stays := "a > 10.0.0.1 10.0.0.2 > 10.0.0.2 10.0.0.3", "a > 10.0.0.1 10.0.0.2 > 10.0.0.2"
	sync(false, []error{locked}, wanted)
	sync(true, []error{refused(false), locked}, wanted, stays)
	sync(true, []error{refused(false), refused(false)}, wanted, stays)
	sync(true, []error{ErrNeedFull, refused(false)}, wanted, "full: "+wanted+", 1 attempted")
	sync(true, []error{refused(true), nil}, "full: "+wanted+", 1 attempted", stays)
	sync(true, []error{nil}, "a > 10.0.0.2 > 10.0.0.2 10.0.0.3")

	// The second delta finds out that the data plane has lost its state.
	tr.SetSlice(slice("a", "10.0.0.3", "10.0.0.4"))
	wanted, stays = "a > 10.0.0.2 10.0.0.3 > 10.0.0.3 10.0.0.4", "a > 10.0.0.2 10.0.0.3 > 10.0.0.3"
	sync(false, []error{ErrNeedFull, refused(true), ErrNeedFull}, wanted, "full: "+wanted+", 1 attempted", stays)
	sync(true, []error{nil}, "full: "+wanted+", 1 attempted")

	// A new Service that is refused with its delta and deleted leaves nothing.
	tr.SetService(service("b", "172.30.0.2"))
	sync(false, []error{locked}, "b > >")
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "b"})
	sync(true, nil)
	if len(e.gone) != 0 || len(c.tried) != 0 {
		t.Errorf("%d Services are left, %d attempted", len(e.gone), len(c.tried))
	}
}

// TestFrontendThatMovesBackToARefusedServiceStays moves a NodePort from Service a to b, and back.
// Of a, the first move fails, and the second one is refused. What the Cursor last acknowledged of a
// has the NodePort, but b took it later and keeps it.
func TestFrontendThatMovesBackToARefusedServiceStays(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	a, b := key("a", tracker.IPv4), key("b", tracker.IPv4)
	var failure error
	c := e.Attach("plane", BackendFunc(func(_ context.Context, d *Delta) error {
		if failure == nil {
			return nil
		}
		return &PartialError{Failed: map[tracker.Key]error{a: failure}, Pruned: true}
	}))
	set := func(name, ip string, nodePort int32, created int64) {
		tr.SetService(service(name, ip, func(s *v1.Service) {
			s.CreationTimestamp = metav1.Unix(created, 0)
			s.Spec.Type = v1.ServiceTypeNodePort
			s.Spec.Ports[0].NodePort = nodePort
		}))
		tr.SetSlice(slice(name, "10.0.0.1"))
	}
	for i, step := range []struct {
		failure error
		ofA     int32
	}{{nil, 30001}, {errors.New("half written"), 30002}, {ErrRefused, 30001}} {
		failure = step.failure
		set("a", "172.30.0.1", step.ofA, 1)
		set("b", "172.30.0.2", 30001, 2)
		if err := c.Sync(t.Context()); !errors.Is(err, failure) {
			t.Fatalf("error %v, want %v", err, failure)
		}
		has := slices.ContainsFunc(c.Port(b).Frontends, func(f Frontend) bool { return f.Port == 30001 })
		if has != (i != 0) {
			t.Errorf("step %d: b has the NodePort: %t", i, has)
		}
	}
}

// TestRefusedTakerLeavesOneOwner refuses a Service that takes a NodePort, in a full delta. Another
// Service that failed to take the NodePort before must not get it from the owner.
func TestRefusedTakerLeavesOneOwner(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var answer func(d *Delta) error
	c := e.Attach("plane", BackendFunc(func(_ context.Context, d *Delta) error { return answer(d) }))
	set := func(name, ip string, created int64, nodePort int32) {
		tr.SetService(service(name, ip, func(s *v1.Service) {
			s.CreationTimestamp = metav1.Unix(created, 0)
			s.Spec.Type = v1.ServiceTypeNodePort
			s.Spec.Ports[0].NodePort = nodePort
		}))
	}
	sync := func(to func(d *Delta) error) error {
		answer = to
		return c.Sync(t.Context())
	}
	set("a", "172.30.0.1", 1, 30002)
	set("b", "172.30.0.2", 2, 30003)
	set("c", "172.30.0.3", 3, 30001)
	if err := sync(func(*Delta) error { return nil }); err != nil {
		t.Fatal(err)
	}
	set("b", "172.30.0.2", 2, 30001)
	c.Resync()
	if err := sync(func(*Delta) error { return errInjected }); err == nil {
		t.Fatal("no error")
	}
	set("a", "172.30.0.1", 1, 30001)
	if err := sync(func(d *Delta) error {
		if d.second {
			return nil
		}
		return &PartialError{Failed: map[tracker.Key]error{key("a", tracker.IPv4): ErrRefused}, Pruned: true}
	}); !InEffect(err) {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"a": false, "b": false, "c": true} {
		s := c.Port(key(name, tracker.IPv4))
		if has := slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.Port == 30001 }); has != want {
			t.Errorf("%s has the NodePort: %t, want %t", name, has, want)
		}
	}
}

// TestRemainingLosesWhatIsGone refuses changes of a Service and checks what stays of it.
func TestRemainingLosesWhatIsGone(t *testing.T) {
	node := &Node{Info: tracker.NodeInfo{Name: "n"}}
	compile := func(eps []string, edit func(*tracker.ServicePort)) *Port {
		p := tracker.PortState{Port: &tracker.ServicePort{
			ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80, NodePort: 30080,
			ExternalIPs: []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2")},
		}}
		p.Port.Key.Namespace, p.Port.Key.Name = "ns", "a"
		p.Port.Key.Protocol, p.Port.Key.Family = v1.ProtocolTCP, tracker.IPv4
		for _, a := range eps {
			p.Endpoints = append(p.Endpoints, &tracker.Endpoint{Addr: netip.MustParseAddrPort(a), Ready: true, Serving: true, Weight: 1})
		}
		if edit != nil {
			edit(p.Port)
		}
		s := Compile(p, node)
		s.ID = 7
		return s
	}
	old := compile([]string{"10.0.0.1:80", "10.0.0.2:80"}, nil)
	addresses := func(list []*tracker.Endpoint) (out []string) {
		for _, ep := range list {
			out = append(out, ep.Addr.String())
		}
		return out
	}

	got := old.remaining(compile([]string{"10.0.0.2:80", "10.0.0.3:80"}, func(p *tracker.ServicePort) {
		p.Affinity = time.Hour
		p.ExternalIPs = p.ExternalIPs[1:]
	}))
	if a := addresses(got.Pool(TargetCluster)); !slices.Equal(a, []string{"10.0.0.2:80"}) || len(got.Selection.Reachable) != 1 {
		t.Errorf("endpoints %v, reachable %d", a, len(got.Selection.Reachable))
	}
	if got.Spec.Affinity != 0 || got.ID != 7 || got.Key != old.Key {
		t.Errorf("%+v", got)
	}
	if n := len(got.Frontends); n != 3 || len(old.Frontends) != 4 {
		t.Errorf("%d frontends of %d", n, len(old.Frontends))
	}
	for _, f := range got.Frontends {
		if f.Target != TargetCluster || f.Addr == netip.MustParseAddr("198.51.100.1") {
			t.Errorf("%+v", f)
		}
	}
	if len(old.Selection.Cluster) != 2 {
		t.Error("the old Service changed")
	}

	// All endpoints are replaced: nothing is left to forward to.
	got = old.remaining(compile([]string{"10.0.0.9:80"}, nil))
	for _, f := range got.Frontends {
		if f.Target != TargetReject || f.Internal != TargetReject {
			t.Errorf("%+v", f)
		}
	}
	if old.remaining(nil) != nil {
		t.Error("something is left of a deleted Service")
	}
}

// TestPartialErrorText checks that the text names the first few Services.
func TestPartialErrorText(t *testing.T) {
	e := &PartialError{Failed: map[tracker.Key]error{}}
	for _, s := range []string{"d", "c", "b", "a"} {
		e.Failed[key(s, tracker.IPv4)] = errInjected
	}
	want := "4 services failed; default/a:p/TCP/IPv4: injected failure; default/b:p/TCP/IPv4: injected failure; default/c:p/TCP/IPv4: injected failure; ..."
	if got := e.Error(); got != want {
		t.Errorf("got %q", got)
	}
}
