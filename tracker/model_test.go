package tracker_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// model is a simple, slow tracker: it keeps all objects and computes everything from
// them. It supports only the objects that the generators below make.
type model struct {
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discovery.EndpointSlice
}

// state maps each port to its main fields and its endpoints.
type state map[tracker.Key]string

func (m model) state() state {
	out := state{}
	for name, s := range m.services {
		if s.Labels != nil || s.Spec.ClusterIP == "None" {
			continue
		}
		for i, f := range s.Spec.IPFamilies {
			family := tracker.IPv4
			if f == v1.IPv6Protocol {
				family = tracker.IPv6
			}
			for _, p := range s.Spec.Ports {
				k := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: name, Port: p.Name, Protocol: p.Protocol}, Family: family}
				eps := map[netip.AddrPort]string{}
				from := map[netip.AddrPort]string{}
				for sliceName, es := range m.slices {
					if sliceName.Namespace != name.Namespace || es.Labels[discovery.LabelServiceName] != name.Name || string(es.AddressType) != string(f) {
						continue
					}
					for _, port := range es.Ports {
						if *port.Name != p.Name || *port.Protocol != p.Protocol {
							continue
						}
						for _, e := range es.Endpoints {
							a := netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*port.Port))
							// Duplicates differ in the node only: the first slice wins.
							if was, ok := from[a]; !ok || sliceName.Name < was {
								from[a], eps[a] = sliceName.Name, fmt.Sprintf(" %s@%s ready=%v", a, *e.NodeName, *e.Conditions.Ready)
							}
						}
					}
				}
				text := fmt.Sprintf("%s:%d", s.Spec.ClusterIPs[i], p.Port)
				for _, a := range slices.SortedFunc(maps.Keys(eps), netip.AddrPort.Compare) {
					text += eps[a]
				}
				out[k] = text
			}
		}
	}
	return out
}

func describe(p tracker.PortState) string {
	text := fmt.Sprintf("%s:%d", p.Port.ClusterIP, p.Port.Port)
	for _, e := range p.Endpoints {
		text += fmt.Sprintf(" %s@%s ready=%v", e.Addr, e.Node, e.Ready)
	}
	return text
}

func randomService(r *rand.Rand, name types.NamespacedName) *v1.Service {
	s := service(name.Namespace, name.Name, fmt.Sprintf("10.96.0.%d", 1+r.IntN(3)))
	switch r.IntN(6) {
	case 0:
		s.Labels = map[string]string{tracker.LabelServiceProxyName: "other"}
	case 1:
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"}
	case 2, 3:
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPv6Protocol)
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf("fd00::%d", 1+r.IntN(3)))
	}
	s.Spec.Ports = nil
	for i, name := range []string{"", "http", "dns"} {
		if r.IntN(2) == 0 {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: name, Port: int32(80 + i), Protocol: pick(r, v1.ProtocolTCP, v1.ProtocolUDP)})
		}
	}
	return s
}

func randomSlice(r *rand.Rand, name types.NamespacedName) *discovery.EndpointSlice {
	s := slice(name.Namespace, name.Name, fmt.Sprint("svc-", r.IntN(3)))
	format := "10.0.0.%d"
	if r.IntN(3) == 0 {
		s.AddressType, format = discovery.AddressTypeIPv6, "fd01::%d"
	}
	s.Ports = nil
	for _, name := range []string{"", "http", "dns"} {
		if r.IntN(2) == 0 {
			s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Port: ptr(int32(8080)), Protocol: pick(r, ptr(v1.ProtocolTCP), ptr(v1.ProtocolUDP))})
		}
	}
	ready := r.IntN(4) > 0
	for _, i := range r.Perm(6)[:r.IntN(4)] {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprintf(format, i+1)}, NodeName: ptr(fmt.Sprint("node-", r.IntN(3))),
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: ptr(true), Terminating: ptr(!ready)},
		})
	}
	return s
}

// TestTrackerMatchesModel sets random objects. After every Take it checks that the
// accumulated updates equal the model, that no untouched Service is returned, and
// that published values do not change.
func TestTrackerMatchesModel(t *testing.T) {
	type published struct {
		update tracker.Update
		text   string
	}
	text := func(u tracker.Update) string {
		var b strings.Builder
		for _, p := range u.Ports {
			fmt.Fprintf(&b, "%s %+v %s\n", p.Port.Key, *p.Port, describe(p))
		}
		return b.String()
	}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 3))
		tr := newSynced(t, tracker.Config{})
		m := model{map[types.NamespacedName]*v1.Service{}, map[types.NamespacedName]*discovery.EndpointSlice{}}
		followed := map[types.NamespacedName]tracker.Update{}
		var history []published
		touched := map[types.NamespacedName]bool{}
		for step := range 400 {
			ns := pick(r, "a", "b")
			svc := types.NamespacedName{Namespace: ns, Name: fmt.Sprint("svc-", r.IntN(3))}
			es := types.NamespacedName{Namespace: ns, Name: fmt.Sprint("slice-", r.IntN(4))}
			touch := func(s *discovery.EndpointSlice) {
				if s != nil {
					touched[types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discovery.LabelServiceName]}] = true
				}
			}
			switch r.IntN(8) {
			case 0:
				tr.DeleteService(svc)
				delete(m.services, svc)
				touched[svc] = true
			case 1, 2:
				s := randomService(r, svc)
				m.services[svc] = s.DeepCopy()
				tr.SetService(s)
				touched[svc] = true
				for i := range s.Spec.ClusterIPs {
					s.Spec.ClusterIPs[i] = "overwritten"
				}
				for i := range s.Spec.Ports {
					s.Spec.Ports[i] = v1.ServicePort{}
				}
			case 3:
				touch(m.slices[es])
				tr.DeleteSlice(es)
				delete(m.slices, es)
			case 4, 5, 6:
				touch(m.slices[es])
				s := randomSlice(r, es)
				// The conditions would change which duplicate wins.
				for _, o := range m.slices {
					for i := range s.Endpoints {
						for _, e := range o.Endpoints {
							if e.Addresses[0] == s.Endpoints[i].Addresses[0] {
								s.Endpoints[i].Conditions = *e.Conditions.DeepCopy()
							}
						}
					}
				}
				m.slices[es] = s.DeepCopy()
				touch(s)
				tr.SetSlice(s)
				for i := range s.Endpoints {
					s.Endpoints[i].Addresses[0] = "overwritten"
					*s.Endpoints[i].Conditions.Ready = !*s.Endpoints[i].Conditions.Ready
				}
			case 7:
				c := tr.Take()
				seen := map[types.NamespacedName]bool{}
				for _, u := range c.Updates {
					if seen[u.Name] {
						t.Fatalf("seed %d step %d: %v is in the changes twice", seed, step, u.Name)
					}
					seen[u.Name] = true
					if !slices.IsSortedFunc(u.Ports, func(a, b tracker.PortState) int { return a.Port.Key.Compare(b.Port.Key) }) {
						t.Fatal("not sorted by key")
					}
					if len(u.Ports)+len(followed[u.Name].Ports) == 0 {
						t.Fatalf("seed %d step %d: %v, which is no Service, is in the changes", seed, step, u.Name)
					}
					if !touched[u.Name] {
						t.Fatalf("seed %d step %d: %v was not changed and is in the changes", seed, step, u.Name)
					}
					checkKept(t, followed[u.Name], u)
					followed[u.Name] = u
					history = append(history, published{u, text(u)})
				}
				clear(touched)
				got := state{}
				for _, u := range followed {
					for _, p := range u.Ports {
						got[p.Port.Key] = describe(p)
					}
				}
				if want := m.state(); !reflect.DeepEqual(got, want) {
					t.Fatalf("seed %d step %d: got\n%v\nwant\n%v", seed, step, got, want)
				}
			}
		}
		for _, h := range history {
			if got := text(h.update); got != h.text {
				t.Fatalf("seed %d: published\n%s\nnow\n%s", seed, h.text, got)
			}
		}

		// A new tracker with the final objects has the same result.
		for _, u := range tr.Take().Updates {
			followed[u.Name] = u
		}
		fresh := newSynced(t, tracker.Config{})
		for _, s := range m.slices {
			fresh.SetSlice(s)
		}
		for _, s := range m.services {
			fresh.SetService(s)
		}
		rebuilt := map[types.NamespacedName]string{}
		for _, u := range fresh.Take().Updates {
			rebuilt[u.Name] = text(u)
		}
		for name, u := range followed {
			if rebuilt[name] != text(u) {
				t.Fatalf("seed %d: %v is\n%s\nin a new tracker\n%s", seed, name, text(u), rebuilt[name])
			}
			delete(rebuilt, name)
		}
		if len(rebuilt) > 0 {
			t.Fatalf("seed %d: missing %v", seed, rebuilt)
		}
	}
}

// checkKept checks that equal values in two updates have the same pointers.
func checkKept(t *testing.T, old, now tracker.Update) {
	t.Helper()
	for _, p := range now.Ports {
		i := slices.IndexFunc(old.Ports, func(o tracker.PortState) bool { return o.Port.Key == p.Port.Key })
		if i < 0 {
			continue
		}
		o := old.Ports[i]
		if o.Port.Equal(p.Port) && o.Port != p.Port {
			t.Fatalf("%v got a new pointer", p.Port.Key)
		}
		if len(p.Endpoints) > 0 && slices.EqualFunc(o.Endpoints, p.Endpoints, (*tracker.Endpoint).Equal) && &o.Endpoints[0] != &p.Endpoints[0] {
			t.Fatalf("the endpoints of %v got a new slice", p.Port.Key)
		}
		for _, e := range p.Endpoints {
			for _, was := range o.Endpoints {
				if was != e && was.Equal(e) {
					t.Fatalf("endpoint %v of %v got a new pointer", e, p.Port.Key)
				}
			}
		}
	}
}

// TestConcurrentTrackerLosesNothing is for the race detector. Several goroutines set
// and change their own objects while one takes and reads; no change may be lost.
func TestConcurrentTrackerLosesNothing(t *testing.T) {
	tr := newSynced(t, tracker.Config{})
	wake := make(chan struct{}, 1)
	tr.Notify(func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	const feeders, steps = 4, 200
	var wg sync.WaitGroup
	for i := range feeders {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 4))
			name := fmt.Sprint("svc-", i)
			for range steps {
				tr.SetService(service("ns", name, fmt.Sprintf("10.96.%d.%d", i, 1+r.IntN(9))))
				tr.SetSlice(with(slice("ns", name, name), fmt.Sprintf("10.0.%d.%d", i, 1+r.IntN(9))))
				tr.SetNode(tracker.NodeInfo{Name: fmt.Sprint("node-", r.IntN(3))})
				tr.Node()
			}
			tr.SetService(service("ns", name, "10.96.0.99"))
			tr.SetSlice(with(slice("ns", name, name), "10.0.0.99"))
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	followed := map[string]string{}
	for running := true; running; {
		select {
		case <-wake:
		case <-done:
			running = false
		}
		for _, u := range tr.Take().Updates {
			for _, p := range u.Ports {
				followed[u.Name.Name] = describe(p)
			}
		}
	}
	for i := range feeders {
		if got, want := followed[fmt.Sprint("svc-", i)], "10.96.0.99:80 10.0.0.99:8080@node-1 ready=true"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
