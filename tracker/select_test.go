package tracker_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// endpoint parses a short description of an endpoint. "1" is 10.0.0.1, ready. "1@n"
// is on node n. Options follow: ",z=a+b" and ",n=a+b" are hints for zones and nodes,
// ",term" is serving and terminating, ",dead" is terminating and not serving, ",not"
// is not ready, and ",readyterm" is ready and terminating.
func endpoint(text string) *tracker.Endpoint {
	fields := strings.Split(text, ",")
	id, node, _ := strings.Cut(fields[0], "@")
	e := &tracker.Endpoint{Addr: netip.MustParseAddrPort("10.0.0." + id + ":80"), Node: node, Ready: true, Serving: true, Weight: 1}
	for _, f := range fields[1:] {
		switch name, value, _ := strings.Cut(f, "="); name {
		case "z":
			e.ForZones = strings.Split(value, "+")
		case "n":
			e.ForNodes = strings.Split(value, "+")
		case "term":
			e.Ready, e.Terminating = false, true
		case "dead":
			e.Ready, e.Serving, e.Terminating = false, false, true
		case "not":
			e.Ready, e.Serving = false, false
		case "readyterm":
			e.Terminating = true
		default:
			panic(f)
		}
	}
	return e
}

func ids(eps []*tracker.Endpoint) string {
	var out []string
	for _, e := range eps {
		a := e.Addr.Addr().As4()
		out = append(out, fmt.Sprint(a[3]))
	}
	return strings.Join(out, " ")
}

// TestSelect selects for the node "me" in the zone "z".
func TestSelect(t *testing.T) {
	plain := tracker.ServicePort{}
	internal := tracker.ServicePort{InternalLocal: true}
	external := tracker.ServicePort{ExternalLocal: true, NodePort: 30000}
	both := tracker.ServicePort{InternalLocal: true, ExternalLocal: true, NodePort: 30000}
	mixed := tracker.ServicePort{InternalLocal: true, NodePort: 30000}
	for _, tt := range []struct {
		name                      string
		port                      tracker.ServicePort
		eps                       string
		cluster, local, reachable string // "-" for a set not in use
		any                       bool
	}{
		{"nothing", plain, "", "", "-", "", false},
		{"nothing, local", both, "", "", "", "", false},
		{"cluster", plain, "1@me 2@you", "1 2", "-", "1 2", true},
		{"unready are left out", plain, "1 2,not 3,dead 4,term", "1", "-", "1", true},
		{"ready though terminating", plain, "1,readyterm 2,term", "1", "-", "1", true},
		{"all terminating", plain, "1,term 2,dead 3,term 4,not", "1 3", "-", "1 3", true},
		{"all gone", plain, "1,dead 2,not", "", "-", "", false},
		{"external Local that is not external", tracker.ServicePort{ExternalLocal: true}, "1@me 2", "1 2", "-", "1 2", true},
		{"NeedLocalSet", tracker.ServicePort{NeedLocalSet: true}, "1@me 2", "1 2", "1", "1 2", true},
		{"PreferLocal", tracker.ServicePort{PreferLocal: true, NodePort: 30080}, "1@me 2", "1 2", "1", "1 2", true},
		{"PreferLocal that is not external", tracker.ServicePort{PreferLocal: true}, "1@me 2", "1 2", "-", "1 2", true},

		{"internal Local", internal, "1@me 2@you 3", "-", "1", "1", true},
		{"internal Local, none here", internal, "2@you 3", "-", "", "", true},
		{"internal Local, terminating here", internal, "1@me,term 2@you", "-", "1", "1", true},
		{"internal Local, only terminating elsewhere", internal, "1@you,term", "-", "", "", true},
		{"internal Local, all gone", internal, "1@me,dead 2@you,not", "-", "", "", false},
		{"external Local", external, "1@me 2@you", "1 2", "1", "1 2", true},
		{"external Local, none here", external, "2@you", "2", "", "2", true},
		{"external Local, terminating here", external, "1@me,term 2@you", "2", "1", "1 2", true},
		{"external Local, terminating everywhere", external, "1@me,term 2@you,term", "1 2", "1", "1 2", true},
		{"external Local, ready here", external, "1@me 2@me,term 3@you,term", "1", "1", "1", true},
		{"internal Local, external Cluster", mixed, "1@me 2@you", "1 2", "1", "1 2", true},

		{"zone", plain, "1,z=z 2,z=y 3,z=y+z", "1 3", "-", "1 3", true},
		{"zone, one without", plain, "1,z=z 2", "1 2", "-", "1 2", true},
		{"zone, unready without", plain, "1,z=z 2,not 3,z=y", "1", "-", "1", true},
		{"zone, none for us", plain, "1,z=x 2,z=y", "1 2", "-", "1 2", true},
		{"zone, all terminating", plain, "1,z=z,term 2,z=y,term", "1 2", "-", "1 2", true},
		{"zone, ours is unready", plain, "1,z=z,not 2,z=y", "2", "-", "2", true},
		{"node", plain, "1,n=me,z=z 2,n=you,z=z", "1", "-", "1", true},
		{"node, one without", plain, "1,n=me,z=z 2,z=z 3,z=y", "1 2", "-", "1 2", true},
		{"node, none for us", plain, "1,n=you,z=z 2,n=you,z=y", "1", "-", "1", true},
		{"node without zones", plain, "1,n=you 2,n=me", "2", "-", "2", true},
		{"node and zone for others", plain, "1,n=you,z=y 2,n=you,z=x", "1 2", "-", "1 2", true},
		{"local ignores hints", external, "1@me,z=y 2@you,z=z", "2", "1", "1 2", true},
		{"local within the zone", external, "1@me,z=z 2@you,z=z 3@you,z=y", "1 2", "1", "1 2", true},
		{"no hints without cluster set", internal, "1@me,z=z", "-", "1", "1", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var eps []*tracker.Endpoint
			for _, text := range strings.Fields(tt.eps) {
				eps = append(eps, endpoint(text))
			}
			me := tracker.NodeInfo{Name: "me", Zone: "z"}
			got := tracker.Select(&tt.port, eps, me)
			show := func(eps []*tracker.Endpoint, used bool) string {
				if !used {
					if eps != nil {
						t.Error("an unused set is not nil")
					}
					return "-"
				}
				return ids(eps)
			}
			if c, l, r := show(got.Cluster, got.UsesCluster), show(got.Local, got.UsesLocal), ids(got.Reachable); c != tt.cluster || l != tt.local || r != tt.reachable {
				t.Errorf("got cluster %q, local %q, reachable %q", c, l, r)
			}
			if got.HasAny != tt.any {
				t.Errorf("got any %v", got.HasAny)
			}
		})
	}
}

func TestNamelessNodeMatchesNothing(t *testing.T) {
	p := tracker.ServicePort{ExternalLocal: true, NodePort: 1}
	// Two empty names do not match.
	empty := []*tracker.Endpoint{endpoint("1,z=,n="), endpoint("2,z=y,n=x")}
	got := tracker.Select(&p, empty, tracker.NodeInfo{})
	if ids(got.Cluster) != "1 2" || ids(got.Local) != "" {
		t.Error(got)
	}
}

func TestSelectSharesMemory(t *testing.T) {
	eps := []*tracker.Endpoint{endpoint("1@me"), endpoint("2@me")}
	for _, p := range []tracker.ServicePort{{}, {InternalLocal: true}, {ExternalLocal: true, NodePort: 1}} {
		if n := testing.AllocsPerRun(10, func() {
			tracker.Select(&p, eps, tracker.NodeInfo{Name: "me"})
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

// TestSelectAgainstModel compares Select with a direct implementation of each set's
// rules.
func TestSelectAgainstModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	filter := func(eps []*tracker.Endpoint, f func(*tracker.Endpoint) bool) (out []*tracker.Endpoint) {
		for _, e := range eps {
			if f(e) {
				out = append(out, e)
			}
		}
		return out
	}
	for range 20000 {
		var eps []*tracker.Endpoint
		for i := range r.IntN(5) {
			eps = append(eps, endpoint(fmt.Sprint(i+1)+pick(r, "", "@me", "@you")+pick(r, "", ",z=z", ",z=y", ",z=y+z")+pick(r, "", ",n=me", ",n=you")+pick(r, "", "", ",term", ",not")))
		}
		p := tracker.ServicePort{InternalLocal: r.IntN(2) == 0, ExternalLocal: r.IntN(2) == 0, NodePort: uint16(r.IntN(2)), NeedLocalSet: r.IntN(4) == 0}
		in := slices.Clone(eps)
		got := tracker.Select(&p, eps, tracker.NodeInfo{Name: "me", Zone: "z"})

		ready := filter(eps, func(e *tracker.Endpoint) bool { return e.Ready })
		leaving := filter(eps, func(e *tracker.Endpoint) bool { return e.Serving && e.Terminating })
		here := func(e *tracker.Endpoint) bool { return e.Node == "me" }
		forNode := func(e *tracker.Endpoint) bool { return slices.Contains(e.ForNodes, "me") }
		forZone := func(e *tracker.Endpoint) bool { return slices.Contains(e.ForZones, "z") }
		all := func(f func(*tracker.Endpoint) bool) bool { return len(filter(ready, f)) == len(ready) }
		cluster := ready
		switch {
		case len(ready) == 0:
			cluster = leaving
		case all(func(e *tracker.Endpoint) bool { return len(e.ForNodes) > 0 }) && len(filter(ready, forNode)) > 0:
			cluster = filter(ready, forNode)
		case all(func(e *tracker.Endpoint) bool { return len(e.ForZones) > 0 }) && len(filter(ready, forZone)) > 0:
			cluster = filter(ready, forZone)
		}
		local := filter(ready, here)
		if len(local) == 0 {
			local = filter(leaving, here)
		}
		if !p.UsesClusterEndpoints() {
			cluster = nil
		}
		if !p.UsesLocalEndpoints() {
			local = nil
		}
		reachable := filter(eps, func(e *tracker.Endpoint) bool { return slices.Contains(cluster, e) || slices.Contains(local, e) })
		if !slices.Equal(got.Cluster, cluster) || !slices.Equal(got.Local, local) || !slices.Equal(got.Reachable, reachable) ||
			got.HasAny != (len(ready)+len(leaving) > 0) {
			t.Fatalf("%+v of %s: got %+v, want cluster %s, local %s", p, ids(eps), got, ids(cluster), ids(local))
		}
		if !slices.Equal(in, eps) {
			t.Fatal("the endpoints were modified")
		}
	}
}

func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }
