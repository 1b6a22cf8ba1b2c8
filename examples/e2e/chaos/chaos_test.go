//go:build linux

package main

import (
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/e2e/internal/nodeagent"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// flags are the command's flags. TestChaosInVM uses all, the other tests -nodeproxy alone.
var flags = newFlags(flag.CommandLine)

func TestMain(m *testing.M) { netlab.Main(m) }

// brief returns the options of one short world.
func brief(t *testing.T, mode string) *options {
	t.Helper()
	netlab.Require(t)
	o := newFlags(flag.NewFlagSet("", flag.PanicOnError))
	o.modes, o.seed, o.worlds, o.rounds, o.dir = mode, 1, 1, 2, t.TempDir()
	m := modes[slices.Index(modeNames(), mode)]
	err := m.supported()
	netlab.Need(t, err == nil, mode)
	if o.nodeproxy, err = nodeagent.Find(t.Context(), flags.nodeproxy, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	return o
}

// TestAgentSurvivesChaos runs a short world in each mode that needs no privileges.
func TestAgentSurvivesChaos(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			o := brief(t, mode)
			if n, err := o.run(t.Context(), t.Output()); n != 0 || err != nil {
				t.Errorf("%d failures, error %v", n, err)
			}
		})
	}
}

// TestMissedChangesAreFound withholds changes from the agent.
func TestMissedChangesAreFound(t *testing.T) {
	o := brief(t, "nftables")
	// No fault makes the agent list the objects again.
	o.loseEvents, o.only, o.rounds, o.settle = true, "foreign table", 8, 3*time.Second
	n, err := o.run(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if n == 0 {
		t.Error("no failure was found")
	}
	if kept, _ := filepath.Glob(filepath.Join(o.dir, "nftables-1.*")); len(kept) != 3 {
		t.Errorf("kept files %q, want a log, the steps and the objects", kept)
	}
}

// TestSeedRepeatsWorld makes the same changes and chooses the same faults twice.
func TestSeedRepeatsWorld(t *testing.T) {
	steps := func() (string, []byte) {
		s := newAPIServer(3)
		s.duplicate = true
		o := newObjects(3, s)
		o.start()
		for range 50 {
			o.step()
		}
		return strings.Join(s.names(slicesOf), " "), s.dump()
	}
	names, objects := steps()
	again, objectsAgain := steps()
	if names != again || string(objects) != string(objectsAgain) {
		t.Error("the same seed made other objects")
	}
}

// TestChaosInVM runs the command in a virtual machine, where all modes are supported:
//
//	go test -run TestChaosInVM -v -timeout 1h . -for 30m -mode ipvs,offload -settle 10m
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
		if err := nodeagent.Build(t.Context(), filepath.Join(dir, agent), "CGO_ENABLED=0"); err != nil {
			t.Fatal(err)
		}
		t.Chdir(dir)
	}
	if !vm.Inside(t, vm.Debian, "") {
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
			o := brief(t, name)
			o.settle = 20 * time.Second
			m := modes[slices.Index(modeNames(), name)]
			w := &world{o: o, mode: m, rng: rand.New(rand.NewPCG(1, 1)), seed: 1}
			defer w.close()
			if err := w.open(); err != nil {
				t.Fatal(err)
			}
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
			if err := w.judge(t.Context()); err != nil || w.result.failures != 0 {
				t.Fatalf("at the start: error %v\n%s", err, w.result.text)
			}
			w.server.endWatches(true)
			later := thief.DeepCopy()
			later.Name, later.Spec.ClusterIP, later.Spec.ClusterIPs, later.Spec.ExternalIPs = "later", "10.96.0.78", []string{"10.96.0.78"}, nil
			w.server.set(services, later)
			if err := w.judge(t.Context()); err != nil || w.result.failures != 0 {
				t.Errorf("after the watches ended: error %v\n%s", err, w.result.text)
			}
		})
	}
}
