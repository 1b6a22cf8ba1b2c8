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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// at gives a Service its own cluster IPs beyond those of svc, and a name that sorts by n.
func at(n int) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.ClusterIP = fmt.Sprintf("10.97.%d.%d", n/250, 1+n%250)
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP, fmt.Sprintf("fd00:10:97::%x", n+1)}
	}
}

// setBoth sets a Service and its endpoints in both families.
func (r *rig) setBoth(i int, eps []int, edits ...func(*v1.Service)) {
	r.tracker.SetService(svc(i, edits...))
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r.tracker.SetSlice(epSlice(i, f, eps...))
	}
}

// chain returns the chains that handle a Service, in the form "handler, chain sticky handler", and
// the number of its endpoints.
func (r *rig) chain(addr string) (chain string, endpoints []string) {
	r.Helper()
	found, err := lookUp(r.Context(), r.backend.config, netip.MustParseAddrPort(addr), v1.ProtocolTCP)
	if err != nil {
		r.Fatal(err)
	}
	for _, a := range found.Endpoints {
		endpoints = append(endpoints, a.Addr().String())
	}
	_, chain, _ = strings.Cut(found.Where, "chain ")
	return chain, endpoints
}

// TestManyAffinityTimeouts has a Service of another tenant for each of very many affinity timeouts.
// All of them are programmed, a victim's endpoints follow its EndpointSlices, and nothing changes
// with a restart from an empty kernel.
func TestManyAffinityTimeouts(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	const attack = 1400
	victim := func(eps ...int) { r.setBoth(0, eps, sticky(10800)) }
	check := func(what string, eps ...string) {
		t.Helper()
		if chain, got := r.chain("10.96.0.1:80"); !slices.Equal(got, eps) || chain != fmt.Sprintf("cluster-ip-sticky, chain sticky-%d-10800s", len(eps)) {
			t.Errorf("%s: chain %s, endpoints %v", what, chain, got)
		}
		for _, a := range []string{"10.97.0.1:80", fmt.Sprintf("[fd00:10:97::%x]:80", attack)} {
			if chain, got := r.chain(a); len(got) != 1 || !strings.HasPrefix(chain, "cluster-ip-sticky, chain sticky-1-2") {
				t.Errorf("%s: %s has chain %s, endpoints %v", what, a, chain, got)
			}
		}
	}
	victim(1, 2)
	r.sync()
	for i := range attack {
		r.setBoth(1000+i, []int{7}, sticky(int32(20000+i)), at(i))
	}
	r.sync()
	victim(1, 3, 4)
	r.sync()
	check("after the attack", "10.244.0.1", "10.244.0.3", "10.244.0.4")
	r.verify()

	// A reboot.
	if err := Cleanup(t.Context(), r.backend.config); err != nil {
		t.Fatal(err)
	}
	r.start()
	r.sync()
	check("after a reboot", "10.244.0.1", "10.244.0.3", "10.244.0.4")
	r.verify()

	// The chains go with the Services.
	for i := range attack {
		r.tracker.DeleteService(backendtest.ServiceName(1000 + i))
	}
	r.sync()
	victim(1, 3)
	r.sync()
	for _, tab := range r.backend.tables.List {
		if n := len(tab.Verdicts()[layout.StickyHandlers]); n > model.KeepUnused+2 {
			t.Errorf("%s: %d sticky handlers are left", tab.Family, n)
		}
		chains, err := r.backend.conn.Chains(r.backend.name, tab.Family)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(chains); n > model.KeepUnused+60 {
			t.Errorf("%s: %d chains are left", tab.Family, n)
		}
	}
	r.verify()
}

// TestTooFewStickyPools has more Services with client affinity than there is room for. Those
// beyond are forwarded without affinity, and no Service loses its own to a new one.
func TestTooFewStickyPools(t *testing.T) {
	t.Parallel()
	host := netlab.NewHost(t)
	r := newRig(t, host)
	r.pools = func(c model.Config) model.Config { c.Sticky = 3; return c }
	r.start()
	expect := func(want ...int) {
		t.Helper()
		for i := range 8 {
			chain, eps := r.chain(fmt.Sprintf("10.96.0.%d:80", i+1))
			if has := strings.Contains(chain, "sticky"); has != slices.Contains(want, i) || len(eps) == 0 && chain != "" {
				t.Errorf("Service %d: chain %s, endpoints %v", i, chain, eps)
			}
		}
	}
	set := func(i int, eps ...int) { r.setBoth(i, eps, sticky(int32(600+i))) }
	for _, i := range []int{3, 4, 5} {
		set(i, 1, 2)
	}
	r.sync()
	// These are new, and their names sort first and last.
	for _, i := range []int{0, 1, 6, 7} {
		set(i, 1, 2)
	}
	r.sync()
	expect(3, 4, 5)
	for i := range 8 {
		if i != 2 {
			set(i, 2, 3, 4)
		}
	}
	r.sync()
	expect(3, 4, 5)
	for i := range 8 {
		if _, eps := r.chain(fmt.Sprintf("10.96.0.%d:80", i+1)); i != 2 && !slices.Equal(eps, []string{"10.244.0.2", "10.244.0.3", "10.244.0.4"}) {
			t.Errorf("Service %d: endpoints %v", i, eps)
		}
	}
	// After a restart, the same Services have affinity.
	r.start()
	r.sync()
	expect(3, 4, 5)
	r.cursor.Resync()
	r.sync()
	expect(3, 4, 5)
	// From an empty kernel, the oldest have, whatever their names.
	for i := range 8 {
		r.tracker.DeleteService(backendtest.ServiceName(i))
	}
	r.sync()
	for i := range 8 {
		if i != 2 {
			r.setBoth(i, []int{2, 3, 4}, sticky(int32(600+i)), func(s *v1.Service) {
				s.CreationTimestamp = metav1.Unix(int64(1000-i), 0)
			})
		}
	}
	if err := Cleanup(t.Context(), r.backend.config); err != nil {
		t.Fatal(err)
	}
	r.start()
	r.sync()
	expect(5, 6, 7)
	// Another gets affinity when one gives it up.
	r.tracker.DeleteService(backendtest.ServiceName(6))
	r.sync()
	expect(4, 5, 7)
	set(2, 1) // it is new
	r.sync()
	expect(4, 5, 7)
}

// TestTooFewPools has more Services than there is room for. Those beyond fail alone, those that have
// rules keep them, even when they want more.
func TestTooFewPools(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.pools = func(c model.Config) model.Config { c.Plain = 4; return c }
	r.start()
	set := func(i int, eps []int, edits ...func(*v1.Service)) { r.setBoth(i, eps, edits...) }
	// sync syncs and checks which Services failed.
	sync := func(want ...int) {
		t.Helper()
		err := r.cursor.Sync(context.Background())
		var partial *ruleset.PartialError
		if err != nil && !errors.As(err, &partial) {
			t.Fatal(err)
		}
		var got []int
		if partial != nil {
			for k, err := range partial.Failed {
				var n int
				if _, scan := fmt.Sscanf(k.Name, "svc-%d", &n); scan != nil || !errors.Is(err, model.ErrTooManyPools) {
					t.Errorf("%s failed: %v", k, err)
				}
				got = append(got, n)
			}
		}
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Errorf("Services %d failed, want %d", got, want)
		}
	}
	expect := func(i int, want ...string) {
		t.Helper()
		if _, eps := r.chain(fmt.Sprintf("10.96.0.%d:80", i+1)); !slices.Equal(eps, want) {
			t.Errorf("Service %d has endpoints %v, want %v", i, eps, want)
		}
	}
	for _, i := range []int{3, 4, 5, 6} {
		set(i, []int{1, 2})
	}
	sync()
	set(0, []int{1, 2})
	set(8, []int{1, 2})
	sync(0, 8)
	// One that has rules wants another pool, for local endpoints. Endpoint 1 is gone, 3 is new.
	local := func(s *v1.Service) {
		nodePort(30003)(s)
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	set(3, []int{2, 3}, local)
	set(4, []int{2, 3})
	sync(0, 3, 8)
	expect(3, "10.244.0.1", "10.244.0.2")
	expect(4, "10.244.0.2", "10.244.0.3")
	expect(0)
	set(3, []int{1, 4}, local)
	r.cursor.Resync()
	sync(0, 3, 8)
	expect(3, "10.244.0.1", "10.244.0.2")

	// After a restart, the Services that have rules keep them, though others sort first.
	set(3, []int{1, 3})
	sync(0, 8)
	r.start()
	sync(0, 8)
	for _, i := range []int{3, 4, 5, 6} {
		if _, eps := r.chain(fmt.Sprintf("10.96.0.%d:80", i+1)); len(eps) != 2 {
			t.Errorf("Service %d has endpoints %v", i, eps)
		}
	}
	r.tracker.DeleteService(backendtest.ServiceName(5))
	r.tracker.DeleteService(backendtest.ServiceName(6))
	sync(0) // it comes before the others are gone
	r.sync()
	expect(0, "10.244.0.1", "10.244.0.2")
}

// TestRefusedServiceTakesNoFrontend gives an older Service the external IP of another one while there
// is no pool for it. The other Service stays as it was until there is a pool.
func TestRefusedServiceTakesNoFrontend(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.pools = func(c model.Config) model.Config { c.Plain = 2; return c }
	r.start()
	older := func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(1, 0) }
	younger := func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(2, 0) }
	external := backendtest.ExternalIPs("198.51.100.1", "2001:db8:3::1")
	refused := func(what string) {
		t.Helper()
		var p *ruleset.PartialError
		if err := r.cursor.Sync(t.Context()); !errors.As(err, &p) || len(p.Failed) != 4 {
			t.Fatalf("%s: %v, want a PartialError for two Services in two families", what, err)
		}
	}
	is := func(what string, want ...string) {
		t.Helper()
		for _, to := range []string{"198.51.100.1:80", "[2001:db8:3::1]:80"} {
			_, eps := r.chain(to)
			if len(eps) != len(want) || strings.HasPrefix(to, "198") && !slices.Equal(eps, want) {
				t.Errorf("%s: %s has the endpoints %v, want %v", what, to, eps, want)
			}
		}
	}
	r.setBoth(3, []int{3}, younger, external)
	r.setBoth(5, []int{5}, younger)
	r.sync()
	r.setBoth(4, []int{4}, older, external)
	refused("taken")
	is("taken", "10.244.0.3")
	r.setBoth(3, []int{3, 6}, younger, external)
	refused("other endpoints")
	is("other endpoints", "10.244.0.3")
	r.cursor.Resync()
	refused("a full delta")
	is("a full delta", "10.244.0.3")
	r.setBoth(3, []int{3}, younger)
	refused("the other leaves")
	is("the other leaves", "10.244.0.3")
	r.tracker.DeleteService(backendtest.ServiceName(5))
	// The deletion follows the others in the delta that it comes with.
	refused("a pool is free")
	r.sync()
	is("a pool is free", "10.244.0.4")
	r.verify()
}
