//go:build linux

package main

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/tracker"
)

// flags are the command's flags. TestChaosInVM uses all, the other tests -nodeproxy alone.
var flags = newFlags(flag.CommandLine)

func TestMain(m *testing.M) { netlab.Main(m) }

// brief returns the options of one short world.
func brief(t *testing.T, mode string) *options {
	t.Helper()
	netlab.Require(t)
	o := newFlags(flag.NewFlagSet("", flag.PanicOnError))
	o.modes, o.seed, o.worlds, o.rounds, o.services, o.dir = mode, 2, 1, 2, 10, t.TempDir()
	m := modes[slices.Index(modeNames(), mode)]
	err := m.supported()
	netlab.Need(t, err == nil, mode)
	if o.nodeproxy, err = process.Nodeproxy(t.Context(), flags.nodeproxy, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	return o
}

// open opens the world of the options.
func open(t *testing.T, o *options) *world {
	t.Helper()
	w, err := o.open(t.Context(), modes[slices.Index(modeNames(), o.modes)], o.seed)
	t.Cleanup(w.close)
	must.Do(t, err)
	if w.rec.failed() {
		t.Fatalf("at the start: %q", w.rec.failures)
	}
	return w
}

// TestAgentSurvivesChaos runs a short world in each mode that needs no privileges, unless tests are
// thorough one round in one mode.
func TestAgentSurvivesChaos(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables", "iptables-legacy"} {
		t.Run(mode, func(t *testing.T) {
			if mode != "nftables" {
				testtime.NeedThorough(t)
			}
			o, kinds := brief(t, mode), []string{"tcp", "udp", "held", "talk"}
			if !testtime.Thorough() {
				o.rounds, o.services, o.seed, kinds = 1, 4, 1, kinds[:2]
			}
			var out strings.Builder
			if n, err := o.run(t.Context(), &out); n != 0 || err != nil {
				t.Errorf("%d failures, error %v", n, err)
			}
			t.Log(out.String())
			for _, kind := range kinds {
				if !strings.Contains(out.String(), kind+" ") {
					t.Errorf("there were no connections of kind %s", kind)
				}
			}
		})
	}
}

// TestLossesAndLeftoversAreFound flushes rules in a fault that is not declared as an outage, and
// leaves an address of a Service behind.
func TestLossesAndLeftoversAreFound(t *testing.T) {
	testtime.NeedThorough(t)
	o := brief(t, "nftables")
	o.rate = 200
	w := open(t, o)
	for range 3 {
		must.Get(w.node.sh("nft flush ruleset"))(t)
		time.Sleep(2 * time.Second)
	}
	w.traffic.end()
	if text := lines(w.rec.failures); w.rec.lost == 0 || !strings.Contains(text, "right but for the retransmission") {
		t.Errorf("failures %q, want lost packets", text)
	}
	w.rec.failures = nil
	must.Get(w.node.sh("nft 'add table ip left; add set ip left mine {type ipv4_addr; elements = {198.51.100.7};}'"))(t)
	o.settle = 5 * time.Second
	must.Do(t, w.end(t.Context()))
	if text := lines(w.rec.failures); !strings.Contains(text, "198.51.100.7") {
		t.Errorf("failures %q, want 198.51.100.7", text)
	}
}

// clusterIP is the frontend of [oneService].
var clusterIP = target{netip.MustParseAddrPort("10.96.0.7:80"), v1.ProtocolTCP}

// localPod returns a pod of the node.
func localPod() *place {
	return &place{name: "pod-1", in: "veth-pod-1", addr: podAddr(0)}
}

// oneService returns an oracle with a Service that is in effect and has one endpoint, and its slice.
func oneService(t *testing.T) (*oracle, *discovery.EndpointSlice) {
	t.Helper()
	o := must.Get(newOracle("primary"))(t)
	svc := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "world", Name: "a"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"}, Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
	}
	slice := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "world", Name: "a-1", Labels: map[string]string{discovery.LabelServiceName: "a"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: new(""), Protocol: new(v1.ProtocolTCP), Port: new(int32(podPorts[0]))}},
		Endpoints: []discovery.Endpoint{{Addresses: []string{podAddr(localPods)[tracker.IPv4].String()}}},
	}
	o.change(watch.Added, svc)
	o.change(watch.Modified, slice)
	o.inEffect()
	return o, slice
}

// TestLostPacketIsAcceptedWhileServiceHasNoEndpoints judges a connection that was established
// after a retransmission.
func TestLostPacketIsAcceptedWhileServiceHasNoEndpoints(t *testing.T) {
	o, slice := oneService(t)
	from := localPod()
	a := newAttempt(from, clusterIP, o.since())
	got := outcome{Outcome: netlab.Outcome{Kind: netlab.Reached, Server: netip.AddrPortFrom(podAddr(localPods)[tracker.IPv4], podPorts[0]), Source: from.addr[tracker.IPv4]}}
	if err := o.judge(a, got); err != nil {
		t.Errorf("without a loss: %v", err)
	}
	wrong := got
	wrong.Server = netip.AddrPortFrom(podAddr(0)[tracker.IPv4], podPorts[0])
	if o.judge(a, wrong) == nil {
		t.Error("another endpoint is accepted")
	}
	got.lost = 1
	if o.judge(a, got) == nil {
		t.Error("a loss is accepted though the Service always had an endpoint")
	}
	more := slice.DeepCopy()
	more.Endpoints = append(more.Endpoints, discovery.Endpoint{Addresses: []string{podAddr(localPods + 1)[tracker.IPv4].String()}})
	o.change(watch.Modified, more)
	if o.judge(a, got) == nil || o.judge(a, wrong) == nil {
		t.Error("a loss or another endpoint is accepted while the Service gets an endpoint")
	}
	o.change(watch.Deleted, slice)
	if err := o.judge(a, got); err != nil {
		t.Errorf("a loss while the endpoints change: %v", err)
	}
}

// TestFlowsOfDeletedServicesAreForgottenByRestarts asks for a flow that was open when its Service was deleted.
func TestFlowsOfDeletedServicesAreForgottenByRestarts(t *testing.T) {
	o, slice := oneService(t)
	a := newAttempt(localPod(), clusterIP, o.since())
	check := func(when string, want bool) {
		t.Helper()
		if got := o.forgotten(a); got != want {
			t.Errorf("%s: forgotten %t, want %t", when, got, want)
		}
	}
	o.restarted.Store(true)
	o.change(watch.Modified, slice)
	check("the Service exists", false)
	o.change(watch.Deleted, &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "world", Name: "a"}})
	check("deleted and restarted", true)
	o.restarted.Store(false)
	check("deleted", false)
}

// TestMissedChangesAreFound deletes a Service without an event.
func TestMissedChangesAreFound(t *testing.T) {
	testtime.NeedThorough(t)
	o := brief(t, "nftables")
	w := open(t, o)
	o.settle = 3 * time.Second
	delete(w.server.objects[services], w.server.names(services)[1])
	w.judge(t.Context())
	if text := lines(w.rec.failures); !strings.Contains(text, "differences after") {
		t.Errorf("failures %q, want differences", text)
	}
	must.Do(t, w.keep())
	if kept, _ := filepath.Glob(filepath.Join(o.dir, "nftables-2.*")); len(kept) != 4 {
		t.Errorf("kept files %q, want a log, the goroutines, the steps and the objects", kept)
	}
}

// TestSeedRepeatsWorld makes the same changes and chooses the same faults twice.
func TestSeedRepeatsWorld(t *testing.T) {
	steps := func() string {
		s := newAPIServer(3)
		s.duplicate = true
		o := newObjects(3, 10, s)
		o.start()
		for range 50 {
			o.step()
		}
		return string(encode(s.objects))
	}
	if first := steps(); steps() != first {
		t.Error("the same seed made other objects")
	}
}

// TestFullTrackingEnds fills connection tracking again while it is full.
func TestFullTrackingEnds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "max")
	must.Do(t, os.WriteFile(file, []byte("262144\n"), 0o600))
	for _, d := range []time.Duration{50 * time.Millisecond, 100 * time.Millisecond} {
		if _, err := fillTracking(file, d); err != nil {
			t.Fatal(err)
		}
		if text, _ := os.ReadFile(file); string(text) != "1\n" {
			t.Errorf("the limit is %q", text)
		}
	}
	time.Sleep(300 * time.Millisecond)
	if text, _ := os.ReadFile(file); string(text) != "262144\n" {
		t.Errorf("the limit stays %q", text)
	}
}

// TestChaosInVM runs the command in a virtual machine, where all modes are supported:
//
//	go test -run TestChaosInVM -v -timeout 2h . -for 6m -mode ipvs,offload -rate 10
//
// The flag -for counts the machine's clock, a second of which takes several.
func TestChaosInVM(t *testing.T) {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "for" || f.Name == "worlds" })
	if !given {
		t.Skip("takes many minutes: runs if -for or -worlds is given")
	}
	const agent = "testdata/nodeproxy"
	if !inMachine() {
		// The machine gets the folder testdata. It lacks shared libraries.
		dir := t.TempDir()
		must.Do(t, os.Mkdir(filepath.Join(dir, "testdata"), 0o755))
		must.Get(process.Nodeproxy(t.Context(), "", filepath.Join(dir, "testdata"), "CGO_ENABLED=0"))(t)
		t.Chdir(dir)
	}
	if !vm.Inside(t, vm.Debian) {
		return
	}
	flags.nodeproxy, flags.dir = agent, t.TempDir()
	n, err := flags.run(t.Context(), t.Output())
	if n != 0 || err != nil {
		t.Errorf("%d failures, error %v", n, err)
	}
	if n == 0 {
		return
	}
	logs, _ := filepath.Glob(filepath.Join(flags.dir, "*.steps"))
	for _, name := range logs {
		text, _ := os.ReadFile(name)
		t.Logf("%s:\n%s", filepath.Base(name), text)
	}
}

// TestExternalIPAtAPIServerLocksNoAgentOut gives a Service the address of the API server and ends
// the agent's watches. The agent must receive later changes.
func TestExternalIPAtAPIServerLocksNoAgentOut(t *testing.T) {
	for _, name := range []string{"nftables", "iptables"} {
		t.Run(name, func(t *testing.T) {
			testtime.NeedThorough(t)
			o := brief(t, name)
			o.settle = 20 * time.Second
			w := open(t, o)
			thief := &v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: "thief"},
				Spec: v1.ServiceSpec{
					ClusterIP: "10.96.0.77", ClusterIPs: []string{"10.96.0.77"}, ExternalIPs: []string{nodeAddr4},
					Ports: []v1.ServicePort{{Name: "p", Port: 6443, Protocol: v1.ProtocolTCP}},
				},
			}
			port, portName := int32(6443), "p"
			slice := &discovery.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: "tenant", Name: "thief-1", Labels: map[string]string{discovery.LabelServiceName: "thief"}},
				AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &portName, Port: &port}},
				Endpoints: []discovery.Endpoint{{Addresses: []string{"10.244.0.99"}}},
			}
			w.server.set(services, thief)
			w.server.set(slicesOf, slice)
			if w.judge(t.Context()); w.rec.failed() {
				t.Fatalf("at the start: %q", w.rec.failures)
			}
			w.server.endWatches(true)
			later := thief.DeepCopy()
			later.Name, later.Spec.ClusterIP, later.Spec.ClusterIPs, later.Spec.ExternalIPs = "later", "10.96.0.78", []string{"10.96.0.78"}, nil
			w.server.set(services, later)
			if w.judge(t.Context()); w.rec.failed() {
				t.Errorf("after the watches ended: %q", w.rec.failures)
			}
		})
	}
}
