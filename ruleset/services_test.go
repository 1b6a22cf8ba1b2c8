package ruleset

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// views is a backend that keeps the addresses in use, the ports of each Service and the
// known endpoints by what a delta yields, and fails for some Services.
type views struct {
	fail      func() bool
	addresses map[netip.Addr]bool
	ports     map[types.NamespacedName][]*Service
	known     map[tracker.Key]map[netip.AddrPort]*tracker.Endpoint
	pools     map[tracker.Key][2]bool
}

func (v *views) Apply(_ context.Context, d *Delta) error {
	failed := map[tracker.Key]error{}
	for i := range d.Changes {
		c := &d.Changes[i]
		if v.fail() {
			failed[c.Key] = errors.New("refused")
			if v.fail() { // half-way
				continue
			}
		}
		for a := range c.UpsertedAddresses() {
			v.addresses[a] = true
		}
		if v.known[c.Key] == nil {
			v.known[c.Key] = map[netip.AddrPort]*tracker.Endpoint{}
		}
		for ep := range c.UpsertedKnown() {
			v.known[c.Key][ep.Addr] = ep
		}
		if failed[c.Key] != nil {
			continue
		}
		for ep := range c.RemovedKnown() {
			delete(v.known[c.Key], ep.Addr)
		}
		had := v.pools[c.Key]
		for i, t := range []Target{TargetCluster, TargetLocal} {
			if had[i] && !c.HadPool(t) && !d.Full {
				return fmt.Errorf("%v had a %v pool", c.Key, t)
			}
			if c.Fields&FieldPools == 0 && had[i] != c.New.HasPool(t) {
				return fmt.Errorf("%v: pools differ without FieldPools", c.Key)
			}
			had[i] = c.New.HasPool(t)
		}
		v.pools[c.Key] = had
	}
	for i := range d.Changes {
		if c := &d.Changes[i]; failed[c.Key] == nil {
			for a := range c.GoneAddresses() {
				delete(v.addresses, a)
			}
		}
	}
	seen := 0
	for s := range d.Services() {
		v.ports[s.Name] = s.Ports
		seen += len(s.Changes)
	}
	if seen != len(d.Changes) {
		return fmt.Errorf("Services yields %d of %d changes", seen, len(d.Changes))
	}
	if len(failed) != 0 {
		return &PartialError{Failed: failed}
	}
	return nil
}

// TestViewsOfADeltaFollowTheRuleset compares what a backend keeps by UpsertedAddresses,
// GoneAddresses, UpsertedKnown, RemovedKnown and Services with a snapshot.
func TestViewsOfADeltaFollowTheRuleset(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 4))
		tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
		failing := false
		v := &views{
			fail:      func() bool { return failing && r.IntN(3) == 0 },
			addresses: map[netip.Addr]bool{}, ports: map[types.NamespacedName][]*Service{},
			known: map[tracker.Key]map[netip.AddrPort]*tracker.Endpoint{}, pools: map[tracker.Key][2]bool{},
		}
		c := e.Attach("views", v)
		for step := range 40 {
			n := r.IntN(4)
			name := fmt.Sprint("s", n)
			switch r.IntN(6) {
			case 0:
				tr.DeleteService(types.NamespacedName{Namespace: "default", Name: name})
			case 1, 2:
				tr.SetSlice(sliceOn(name, pick(r, "n1", "n2"), []string{"10.0.0.1", "10.0.0.2"}[:r.IntN(3)]...))
			default:
				tr.SetService(service(name, fmt.Sprint("172.30.0.", 1+n), func(s *v1.Service) {
					for _, a := range []string{"192.0.2.1", "192.0.2.2"} {
						if r.IntN(2) == 0 {
							s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, a)
						}
					}
					s.Spec.Ports[0].Port = int32(80 + n + r.IntN(2))
					if r.IntN(2) == 0 {
						s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprint("fd00::", 1+n))
						s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPv6Protocol)
					}
					if r.IntN(2) == 0 {
						s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "q", Port: 90, Protocol: v1.ProtocolUDP})
					}
					if r.IntN(3) == 0 {
						s.Spec.InternalTrafficPolicy = ptr(v1.ServiceInternalTrafficPolicyLocal)
					}
				}))
			}
			failing = step%10 < 7
			if err := c.Sync(t.Context()); err != nil && !failing {
				t.Fatal(err)
			}
			if failing {
				var p *PartialError
				if err := c.Sync(t.Context()); err != nil && !errors.As(err, &p) {
					t.Fatal(err)
				}
				continue
			}
			snap := e.Snapshot()
			addresses, endpoints := map[netip.Addr]bool{}, 0
			for _, s := range snap.Services {
				for _, f := range s.Frontends {
					addresses[f.Addr] = true
				}
				for _, ep := range s.Endpoints {
					if !v.known[s.Key][ep.Addr].Equal(ep) {
						t.Fatalf("seed %d: %v lacks endpoint %v", seed, s.Key, ep)
					}
				}
				endpoints += len(s.Endpoints)
				if got := v.ports[s.Key.NamespacedName]; !slices.Equal(got, snap.Ports(s.Key.NamespacedName)) {
					t.Fatalf("seed %d step %d: %v has ports %v", seed, step, s.Key, got)
				}
			}
			if !maps.Equal(addresses, v.addresses) {
				t.Fatalf("seed %d step %d: addresses %v, want %v", seed, step, v.addresses, addresses)
			}
			for k, list := range v.known {
				endpoints -= len(list)
				if len(list) != 0 && c.Service(k) == nil {
					t.Fatalf("seed %d: endpoints of %v stay", seed, k)
				}
			}
			if endpoints != 0 {
				t.Fatalf("seed %d step %d: %d endpoints too few", seed, step, endpoints)
			}
			for n, ports := range v.ports {
				if len(ports) != 0 && snap.Ports(n) == nil {
					t.Fatalf("seed %d: %v stays", seed, n)
				}
			}
			if len(e.addresses[PortRangesNone]) != len(addresses) {
				t.Fatalf("seed %d: the engine counts %d addresses, want %d", seed, len(e.addresses[PortRangesNone]), len(addresses))
			}
		}
	}
}

// TestUpsertedFrontendsAreThoseThatDiffer changes one frontend of three.
func TestUpsertedFrontendsAreThoseThatDiffer(t *testing.T) {
	a := &Service{Key: key("s", tracker.IPv4), Frontends: []Frontend{
		{Kind: KindClusterIP, Addr: addrs("172.30.0.1")[0], Port: 80, Target: TargetReject},
		{Kind: KindExternalIP, Addr: addrs("192.0.2.1")[0], Port: 80, Target: TargetReject},
		{Kind: KindNodePort, Port: 30000, Target: TargetReject},
	}}
	b := *a
	b.Frontends = slices.Clone(a.Frontends)
	b.Frontends[2].Target = TargetCluster
	ports := func(c Change) (out []uint16) {
		for f := range c.UpsertedFrontends() {
			out = append(out, f.Port)
		}
		return out
	}
	if got := ports(Change{Old: a, New: &b, Fields: FieldFrontends}); !slices.Equal(got, []uint16{30000}) {
		t.Errorf("one frontend differs, got %v", got)
	}
	if got := ports(Change{Old: a, New: &b, Fields: FieldAll}); len(got) != 3 {
		t.Errorf("after a failure, got %v", got)
	}
	if got := ports(Change{Old: a, New: a, Fields: FieldCluster}); got != nil {
		t.Errorf("no frontend differs, got %v", got)
	}
}

// TestChangeHasNoEncoding encodes a Change.
func TestChangeHasNoEncoding(t *testing.T) {
	for _, c := range []any{Change{}, &Change{}, &Delta{Changes: []Change{{}}}} {
		if out, err := json.Marshal(c); err == nil {
			t.Errorf("JSON of a %T: %s", c, out)
		}
		if err := gob.NewEncoder(&bytes.Buffer{}).Encode(c); err == nil {
			t.Errorf("gob encodes a %T", c)
		}
	}
}

// TestEndedNotifyIsNotCalled ends a registration while another stays.
func TestEndedNotifyIsNotCalled(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var ended, stays int
	end := e.Notify(func() { ended++ })
	e.Notify(func() { stays++ })
	end()
	end()
	tr.SetService(service("a", "172.30.0.1"))
	e.SetServiceCIDRs(prefixes("172.30.0.0/16"))
	if ended != 0 || stays != 2 || len(e.notify) != 1 {
		t.Errorf("%d calls after the end, %d of the other, %d registered", ended, stays, len(e.notify))
	}
}
