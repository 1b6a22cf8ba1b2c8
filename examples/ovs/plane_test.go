package ovs

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

func TestConformance(t *testing.T) {
	conformance.Simulate(t, conformance.Simulation{
		New: func(_ testing.TB, env conformance.SimEnv) conformance.Fake {
			sw := newMemory(env.Fail, env.Look)
			return conformance.Fake{
				Backend: func() ruleset.Backend {
					p := must.Get(New(&sw.Switch))(t)
					return p
				},
				Handle: func(p ruleset.Packet) conformance.Outcome {
					r := sw.process(p)
					out := conformance.Outcome{Action: r.Action, Affinity: r.Affinity}
					for _, b := range r.Buckets {
						out.Endpoints = append(out.Endpoints, conformance.Choice{
							Addr: b.Endpoint.Addr, Weight: int(b.Weight),
							Masquerade: r.Masquerade || b.Endpoint.Addr.Addr() == p.From, // hairpin
						})
					}
					return out
				},
				Dump: func() string { return dump(sw) },
			}
		},
		Skip: map[conformance.Feature]string{
			conformance.ConsistentHash:    "the switch chooses the bucket",
			conformance.LoopbackNodePorts: "packets to loopback addresses do not pass the switch",
		},
	})
}

// dump returns a switch's state without the numbers of groups.
func dump(sw *memory) string {
	var lines []string
	for k, f := range sw.Flows.All() {
		f.Group, f.Internal = 0, 0
		lines = append(lines, fmt.Sprintln("flow", k, f))
	}
	for _, g := range sw.Groups.All() {
		lines = append(lines, fmt.Sprintln("group", g))
	}
	for e := range sw.Endpoints.All() {
		lines = append(lines, fmt.Sprintln("endpoint", e))
	}
	for a := range sw.VIPs.All() {
		lines = append(lines, fmt.Sprintln("cluster IP", a))
	}
	return strings.Join(slices.Sorted(slices.Values(lines)), "")
}

// TestRestartWritesNothing restarts with an unchanged switch, and with a Service deleted
// between the two processes. Groups must keep their numbers.
func TestRestartWritesNothing(t *testing.T) {
	sw := newMemory(func() error { return nil }, func() {})
	names := []string{"a", "b", "c"}
	start := func(names ...string) {
		t.Helper()
		tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}))(t)
		e := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
		p := must.Get(New(&sw.Switch))(t)
		cursor := e.Attach("ovs", p)
		for _, name := range names {
			tr.SetService(&v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
				Spec:       v1.ServiceSpec{ClusterIP: "10.96.0." + fmt.Sprint(name[0]), Ports: []v1.ServicePort{{Port: 80}}},
			})
			port, unnamed := int32(8080), ""
			tr.SetSlice(&discovery.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
				AddressType: discovery.AddressTypeIPv4,
				Ports:       []discovery.EndpointPort{{Name: &unnamed, Port: &port}},
				Endpoints:   []discovery.Endpoint{{Addresses: []string{"10.0.0.1"}}, {Addresses: []string{"10.0.0.2"}}},
			})
		}
		tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		must.Do(t, cursor.Sync(t.Context()))
	}
	numbers := func() map[types.NamespacedName]uint32 {
		out := map[types.NamespacedName]uint32{}
		for id, g := range sw.Groups.All() {
			out[g.Name.Service.NamespacedName] = id
		}
		return out
	}
	start(names...)
	before, writes := numbers(), sw.writes
	// The node, two shared endpoints, and a cluster IP, a group and a flow for each Service.
	if writes != 1+2+3*3 {
		t.Errorf("%d writes for three Services with the same two endpoints", writes)
	}
	start("c", "b", "a")
	if n := sw.writes - writes; n != 0 || !maps.Equal(numbers(), before) {
		t.Errorf("%d writes after a restart; groups %v, before %v", n, numbers(), before)
	}
	writes = sw.writes
	start("c", "b")
	delete(before, types.NamespacedName{Namespace: "ns", Name: "a"})
	if n := sw.writes - writes; n != 3 || !maps.Equal(numbers(), before) {
		t.Errorf("%d writes with a Service deleted before a restart; groups %v, before %v", n, numbers(), before)
	}
}
