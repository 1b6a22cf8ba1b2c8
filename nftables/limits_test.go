//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
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
	found := must.Get(lookUp(r.Context(), r.backend.config, netip.MustParseAddrPort(addr), v1.ProtocolTCP))(r)
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
	must.Do(t, Cleanup(t.Context(), r.backend.config))
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
		if n := len(tab.Chains.Verdicts()[layout.StickyHandlers]); n > model.KeepUnused+2 {
			t.Errorf("%s: %d sticky handlers are left", tab.Family, n)
		}
		chains := must.Get(r.backend.conn.Chains(r.backend.name, tab.Family))(t)
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
	must.Do(t, Cleanup(t.Context(), r.backend.config))
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

// TestServiceWithoutPoolIsRejected has fewer pools than the Services want. Those that have a pool keep it, even when
// they want another, and connections to what has none are rejected until there is one.
func TestServiceWithoutPoolIsRejected(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.pools = func(c model.Config) model.Config { c.Plain = 2; return c }
	r.start()
	sync := func(want int) {
		t.Helper()
		p := &ruleset.PartialError{}
		if err := r.cursor.Sync(t.Context()); err != nil && !errors.As(err, &p) || len(p.Failed) != want || want != 0 && !errors.Is(err, model.ErrTooManyPools) {
			t.Fatalf("Sync returned %v, want %d failed Services", err, want)
		}
		if err := r.backend.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
	expect := func(addr, chain string, want ...string) {
		t.Helper()
		if in, eps := r.chain(addr); in != chain || !slices.Equal(eps, want) {
			t.Errorf("%s: chain %s with the endpoints %v, want %s with %v", addr, in, eps, chain, want)
		}
	}
	external := backendtest.ExternalIPs("198.51.100.1", "2001:db8:3::1")
	created := func(n int64) func(*v1.Service) {
		return func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(n, 0) }
	}
	r.setBoth(3, []int{3}, created(2), external)
	r.setBoth(5, []int{5}, created(2))
	sync(0)
	r.setBoth(4, []int{4}, created(1), external) // older, so that it takes the address
	sync(2)
	expect("10.96.0.4:80", "cluster-ip-1", "10.244.0.3")
	expect("10.96.0.5:80", layout.ChainNoEndpoints)
	expect("198.51.100.1:80", layout.ChainNoEndpoints)
	r.setBoth(5, []int{2, 5}, created(2), func(s *v1.Service) { // wants another pool, for local endpoints
		nodePort(30005)(s)
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	})
	sync(4)
	expect("10.96.0.6:80", "cluster-ip-2", "10.244.0.2", "10.244.0.5")
	r.tracker.DeleteService(backendtest.ServiceName(5))
	sync(2) // the deletion follows the others
	r.sync()
	expect("198.51.100.1:80", "external-1", "10.244.0.4")
	r.verify()
}
