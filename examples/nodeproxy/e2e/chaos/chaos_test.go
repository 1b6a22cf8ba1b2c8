//go:build linux

package main

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/vm"
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
	if o.nodeproxy = flags.nodeproxy; o.nodeproxy == "" {
		o.nodeproxy = filepath.Join(t.TempDir(), "nodeproxy")
		if err := buildAgent(t.Context(), o.nodeproxy, os.Environ()); err != nil {
			t.Fatal(err)
		}
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
	if os.Getenv("PROXIER_VM_INSIDE") == "" {
		// The machine gets the folder testdata. It lacks shared libraries.
		dir := t.TempDir()
		if err := buildAgent(t.Context(), filepath.Join(dir, agent), append(os.Environ(), "CGO_ENABLED=0")); err != nil {
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
