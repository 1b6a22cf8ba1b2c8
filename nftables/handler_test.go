//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestPlainHandlersAreBounded counts the possible handlers of Services without affinity, for all
// numbers of endpoints.
func TestPlainHandlersAreBounded(t *testing.T) {
	sizes := map[int]bool{}
	for n := 1; n <= maxPool+1; n++ {
		sizes[bucketsFor(n)] = true
	}
	found := map[handler]bool{}
	s := &ruleset.Service{Port: &tracker.ServicePort{}}
	add := func(c handler) {
		// A pool of another size differs in its buckets only.
		if c.buckets == 0 {
			found[c] = true
			return
		}
		for n := range sizes {
			c.buckets = n
			found[c] = true
		}
	}
	s.Selection.Cluster, s.Selection.Local = make([]*tracker.Endpoint, 1), make([]*tracker.Endpoint, 1)
	targets := []ruleset.Target{ruleset.ToCluster, ruleset.ToLocal, ruleset.Reject, ruleset.Drop}
	for _, target := range targets {
		for _, internal := range targets {
			for m := range ruleset.Masquerade(8) {
				for _, sources := range []string{"", "10.0.0.0/8"} {
					f := &ruleset.Frontend{Target: target, Internal: internal, Masquerade: m}
					if sources != "" {
						f.Sources = append(f.Sources, netip.MustParsePrefix(sources))
					}
					add(handlerOf(s, f))
					if c, ok := internalHandlerOf(s, f); ok {
						add(c)
					}
				}
			}
		}
	}
	if len(found) > maxPlainHandlers {
		t.Errorf("%d handlers, room for %d", len(found), maxPlainHandlers)
	}
	c := newHandlers()
	for k := range found {
		if !c.room([]handler{k}) {
			t.Fatal("no room")
		}
		c.add(k)
	}
	for i := 0; c.room([]handler{{buckets: 1, affinity: time.Duration(i)*time.Second + 1}}); i++ {
		c.add(handler{buckets: 1, affinity: time.Duration(i)*time.Second + 1})
	}
	if n := len(c.number); n > maxHandler || c.sticky != maxStickyHandlers {
		t.Errorf("%d handlers, %d of them with affinity", n, c.sticky)
	}
}

// TestTooManyAffinityTimeoutsFailAlone has more affinity timeouts than there is room for. Only
// Services beyond the limit fail, never Services without affinity. Once enough Services are
// deleted, the others fit.
func TestTooManyAffinityTimeoutsFailAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	const greedy = 1100 // each takes two handlers
	name := func(i int) types.NamespacedName {
		return types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("svc-%d", i)}
	}
	v4 := func(s *v1.Service) {
		s.Spec.ClusterIP = "10.96.0.1"
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol}
	}
	set := func(i int, eps int, edits ...func(*v1.Service)) {
		edits = append([]func(*v1.Service){v4, func(s *v1.Service) {
			s.Spec.ClusterIP = fmt.Sprintf("10.96.%d.%d", 1+i/250, 1+i%250)
			s.Spec.ClusterIPs[0] = s.Spec.ClusterIP
		}}, edits...)
		r.tracker.SetService(svc(i, edits...))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(eps)...))
	}
	nodePort := func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
	}
	for i := range greedy {
		set(i, 1, sticky(int32(1000+i)), nodePort, func(s *v1.Service) { s.Spec.Ports[0].NodePort = int32(30000 + i) })
	}
	ctx := context.Background()
	// failed syncs and returns the number of failed Services, each of which must lack a
	// handler.
	failed := func(what string) int {
		t.Helper()
		err := r.cursor.Sync(ctx)
		if err == nil {
			return 0
		}
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) {
			t.Fatalf("%s: Sync returned %v", what, err)
		}
		for k, err := range partial.Failed {
			if !errors.Is(err, errTooManyHandlers) {
				t.Fatalf("%s: %s: %v", what, k, err)
			}
		}
		return len(partial.Failed)
	}
	want := greedy - maxStickyHandlers/2
	if n := failed("cold start"); n != want {
		t.Errorf("cold start: %d Services failed, want %d", n, want)
	}
	if n := failed("full delta"); n != want || r.last.Full {
		t.Errorf("another try: %d Services failed, full: %t", n, r.last.Full)
	}
	// Services without affinity do not fail.
	for i, eps := range []int{1, 2, 3, 5, 18, 40} {
		set(2000+i, eps, nodePort)
		if n := failed("others"); n != want || r.last.Full {
			t.Errorf("a Service without affinity: %d Services failed, full: %t", n, r.last.Full)
		}
	}
	// Services whose handlers exist do not fail.
	set(2010, 1, sticky(1000))
	if n := failed("same timeout"); n != want || r.last.Full {
		t.Errorf("a Service with a timeout in use: %d Services failed, full: %t", n, r.last.Full)
	}
	r.cursor.Resync()
	if n := failed("full delta"); n != want {
		t.Errorf("a full delta: %d Services failed", n)
	}
	// A full delta makes room once many handlers are unused.
	gone, fulls := 0, 0
	for gone < greedy-100 {
		for range 20 {
			r.tracker.DeleteService(name(gone))
			gone++
		}
		failed("some are gone")
		if r.last.Full {
			fulls++
		}
	}
	if n := failed("most are gone"); n != 0 {
		t.Errorf("%d Services failed though there is room", n)
	}
	if fulls == 0 || fulls > 8 {
		t.Errorf("%d full deltas made room", fulls)
	}
	r.verify()
}
