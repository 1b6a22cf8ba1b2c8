package tracker_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

func newEndpoints(t *testing.T, c tracker.Config) (*tracker.EndpointsChangeTracker, *events) {
	t.Helper()
	var e events
	c.Events = &e
	et := must.Get(tracker.NewEndpointsChangeTracker(c))(t)
	return et, &e
}

func triggered(s *discovery.EndpointSlice, at string) *discovery.EndpointSlice {
	s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: at}
	return s
}

func six(s *discovery.EndpointSlice) *discovery.EndpointSlice {
	s.AddressType = discovery.AddressTypeIPv6
	return s
}

func TestEndpointChanges(t *testing.T) {
	et, e := newEndpoints(t, tracker.Config{})
	if !et.EndpointSliceUpdate(with(slice("ns", "a", "svc"), "10.0.0.1", "10.0.0.2"), false) || !et.Set(six(with(slice("ns", "b", "svc"), "fd00::1"))) {
		t.Error("a new slice does not count as a change")
	}
	got := et.Take()
	if len(got) != 1 || got[0].Name != named("svc") || got[0].Old != nil || len(got[0].New) != 2 {
		t.Fatal(got)
	}
	m := et.Map()
	if len(m) != 2 || len(m[key("svc", "http", tracker.IPv4)]) != 2 || m[key("svc", "http", tracker.IPv6)][0].String() != "[fd00::1]:8080" {
		t.Error(m)
	}
	if w := m[key("svc", "http", tracker.IPv4)][0].Weight; w != 1 {
		t.Error("weight", w)
	}
	if et.Set(with(slice("ns", "a", "svc"), "10.0.0.2", "10.0.0.1")) {
		t.Error("a reordering counts as a change")
	}
	if !et.EndpointSliceUpdate(slice("ns", "a", "svc"), true) || et.EndpointSliceUpdate(slice("ns", "a", "svc"), true) {
		t.Error("a removal does not count as a change")
	}
	if got := et.Take(); len(got) != 1 || len(got[0].Old) != 2 || len(got[0].New) != 1 || &got[0].New[0].Endpoints[0] != &got[0].Old[1].Endpoints[0] {
		t.Error(got)
	}
	if et.Set(nil) || et.EndpointSliceUpdate(nil, true) || et.Delete(named("missing")) {
		t.Error("deleting a missing slice counts as a change")
	}
	if len(*e) != 0 {
		t.Error(*e)
	}
	bad := with(slice("ns", "c", "svc"), "10.0.0.x")
	et.Set(bad)
	if len(*e) != 1 || !strings.HasPrefix((*e)[0], "EndpointSlice ns/c true "+string(tracker.ReasonAddress)) {
		t.Error(*e)
	}
}

func TestFQDNSliceIsReportedOnce(t *testing.T) {
	et, e := newEndpoints(t, tracker.Config{})
	s := with(slice("ns", "a", "svc"), "db.example.com")
	s.AddressType = discovery.AddressTypeFQDN
	for range 2 {
		if et.Set(s) {
			t.Error("an FQDN slice counts as a change")
		}
	}
	if len(*e) != 1 || !strings.HasPrefix((*e)[0], "EndpointSlice ns/a true "+string(tracker.ReasonAddressType)) || !strings.Contains((*e)[0], "FQDN") {
		t.Error(*e)
	}
}

func TestFamiliesAndSelectedSlices(t *testing.T) {
	et, e := newEndpoints(t, tracker.Config{Families: []tracker.Family{tracker.IPv6}})
	if et.Set(with(slice("ns", "a", "svc"), "10.0.0.1")) || !et.Set(six(with(slice("ns", "a", "svc"), "fd00::1"))) || !et.Set(with(slice("ns", "a", "svc"), "10.0.0.1")) {
		t.Error("a slice of an untracked family counts as a change")
	}
	if len(et.Take()) != 0 || len(*e) != 0 {
		t.Error("an IPv4 slice is tracked or reported", *e)
	}

	labeled := func(label string) *discovery.EndpointSlice {
		s := with(slice("ns", "a", "svc"), "10.0.0.1")
		s.Labels[label] = "x"
		return s
	}
	for _, name := range []string{"", "x", "y"} {
		et, _ := newEndpoints(t, tracker.Config{Selector: tracker.Selector{ProxyNames: []string{name}}})
		if !et.Set(labeled(tracker.LabelServiceProxyName)) || !et.Delete(named("a")) {
			t.Errorf("proxy %q: a slice with a proxy name is excluded", name)
		}
		if et.Set(labeled(v1.IsHeadlessService)) {
			t.Errorf("proxy %q: a headless slice is not excluded", name)
		}
		if !et.Set(with(slice("ns", "a", "svc"), "10.0.0.1")) || !et.Set(labeled(v1.IsHeadlessService)) {
			t.Errorf("proxy %q: a slice that becomes headless", name)
		}
	}
}

func TestTriggerTimesAreTaken(t *testing.T) { synctest.Test(t, triggerTimes) }

func triggerTimes(t *testing.T) {
	start := time.Now() // in the bubble, even when the tracker is made
	later := func(n int) string { return start.Add(time.Duration(n) * time.Millisecond).Format(time.RFC3339Nano) }
	et, e := newEndpoints(t, tracker.Config{})
	take := func(want ...int) {
		t.Helper()
		var got []int
		for _, c := range et.Take() {
			for _, at := range c.Triggers {
				got = append(got, int(at.Sub(start)/time.Millisecond))
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	et.Set(triggered(with(slice("ns", "a", "svc"), "10.0.0.1"), later(1)))
	et.Set(triggered(with(slice("ns", "b", "svc"), "10.0.0.2"), later(2)))
	take(1, 2)
	take()
	et.Set(triggered(with(slice("ns", "a", "svc"), "10.0.0.1"), later(3))) // no change
	et.Set(triggered(with(slice("ns", "b", "svc"), "10.0.0.3"), later(4)))
	take(4)
	et.Set(triggered(with(slice("ns", "b", "svc"), "10.0.0.4"), later(-1))) // before the tracker
	et.Set(triggered(with(slice("ns", "b", "svc"), "10.0.0.5"), later(0)))
	take()
	if len(*e) != 0 {
		t.Error(*e)
	}
	et.Set(triggered(with(slice("ns", "b", "svc"), "10.0.0.6"), "yesterday"))
	take()
	if len(*e) != 1 {
		t.Error(*e)
	}
	et.Set(triggered(with(slice("ns", "a", "svc"), "10.0.0.7"), later(5)))
	et.Delete(named("b")) // drops the recorded times
	take()
	et.Set(triggered(with(slice("ns", "a", "svc"), "10.0.0.8"), later(6)))
	et.Set(triggered(with(slice("ns", "a", "other"), "10.0.0.8"), later(7))) // so does a move
	take(7)
	for i := range 1000 {
		et.Set(triggered(with(slice("ns", "a", "other"), []string{"10.0.0.1", "10.0.0.2"}[i&1]), later(8)))
	}
	et.Set(triggered(with(slice("ns", "a", "other"), "10.0.0.3"), later(8)))
	if got := et.Take(); len(got) != 1 || len(got[0].Triggers) != 256 {
		t.Error("trigger times are not bounded", got)
	}
}

func TestOnEndpoint(t *testing.T) {
	refused := errors.New("refused")
	et, e := newEndpoints(t, tracker.Config{OnEndpoint: func(s *discovery.EndpointSlice, ep *discovery.Endpoint, to *tracker.Endpoint) error {
		if ep.Hostname != nil {
			return refused
		}
		to.Weight = 7
		to.Ext = color(s.Annotations["color"])
		to.Addr = endpoint("99").Addr
		return nil
	}})
	s := with(slice("ns", "a", "svc"), "10.0.0.2", "10.0.0.1")
	s.Endpoints[0].Hostname = ptr("x")
	s.Annotations = map[string]string{"color": "red"}
	et.Set(s)
	et.Take()
	got := et.Get(named("svc"))[0].Endpoints
	if len(got) != 1 || got[0].Weight != 7 || got[0].Ext != color("red") || got[0].String() != "10.0.0.1:8080" {
		t.Error(got)
	}
	if len(*e) != 1 || !strings.Contains((*e)[0], string(tracker.ReasonHookFailed)) || !strings.Contains((*e)[0], "refused") {
		t.Error(*e)
	}
	if et.Set(s) {
		t.Error("an equal extension counts as a change")
	}
	s.Annotations["color"] = "blue"
	if !et.Set(s) {
		t.Error("another extension does not count as a change")
	}
}

func TestLocalReadyEndpoints(t *testing.T) {
	et, _ := newEndpoints(t, tracker.Config{})
	s := with(slice("ns", "a", "svc"), "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5")
	s.Ports = append(s.Ports, discovery.EndpointPort{Name: ptr("b"), Port: ptr(int32(9))})
	s.Endpoints[1].NodeName = ptr("other")
	s.Endpoints[2].NodeName = nil
	s.Endpoints[3].Conditions = discovery.EndpointConditions{Ready: ptr(false), Serving: ptr(true), Terminating: ptr(true)}
	et.Set(s)
	et.Set(six(with(slice("ns", "b", "svc"), "fd00::1")))
	et.Set(six(with(slice("ns", "c", "six"), "fd00::1", "fd00::2")))
	if got := et.LocalReadyEndpoints("node-1"); len(got) != 0 {
		t.Error("endpoints are counted before Take:", got)
	}
	et.Take()
	if got := et.LocalReadyEndpoints("node-1"); len(got) != 2 || got[named("svc")] != 2 || got[named("six")] != 2 {
		t.Error(got)
	}
	if got := et.LocalReadyEndpoints("other"); len(got) != 1 || got[named("svc")] != 1 {
		t.Error(got)
	}
	if got := et.LocalReadyEndpoints(""); len(got) != 0 {
		t.Error("endpoints without a node are local to a node without a name:", got)
	}
}

// TestDuplicateWithANodeStaysLocal lists an address with and without nodeName, in both orders.
func TestDuplicateWithANodeStaysLocal(t *testing.T) {
	for known := range 2 {
		et, _ := newEndpoints(t, tracker.Config{})
		s := with(slice("ns", "a", "svc"), "10.0.0.1", "10.0.0.1")
		s.Endpoints[1-known].NodeName = nil
		et.Set(s)
		et.Take()
		if got := et.LocalReadyEndpoints("node-1"); got[named("svc")] != 1 {
			t.Errorf("with nodeName in entry %d: %v local endpoints, want 1", known, got)
		}
	}
}
