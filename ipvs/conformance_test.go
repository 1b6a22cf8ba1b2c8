//go:build linux

package ipvs

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestConformance runs the suite that all backends must pass.
func TestConformance(t *testing.T) {
	if inMachine(t) {
		conformance.Run(t, conformance.Options{New: newForWorld, Skip: skips})
	}
}

// newForWorld returns a Backend beside network policies of another program.
func newForWorld(tb testing.TB, env conformance.Env) ruleset.Backend {
	node := must.Get(netns.Open(env.NetNS))(tb)
	tb.Cleanup(func() { node.Close() })
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			cmd := netlab.Command(tb, program, "-A", chain, "-j", "MARK", "--set-xmark", foreignMark)
			must.Do(tb, node.Do(cmd.Run))
		}
	}
	b := must.Get(New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families}))(tb)
	ctx, cancel := context.WithCancel(context.Background())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		_ = b.Watch(ctx, time.Hour, func(err error) { tb.Errorf("watch: %v", err) })
	}()
	tb.Cleanup(func() {
		if tb.Failed() {
			describe(tb, node.Do)
		}
		cancel()
		<-watched
		b.Close()
	})
	return b
}

// describe logs the kernel's virtual servers, connections and sets.
func describe(tb testing.TB, inside func(func() error) error) {
	err := inside(func() error {
		for _, c := range []string{"ipvsadm -Ln", "ipvsadm -Lnc", "ipset save"} {
			args := strings.Fields(c)
			out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
			tb.Logf("%s: %v\n%s", c, err, out)
		}
		return nil
	})
	if err != nil {
		tb.Error(err)
	}
}

// TestRandomWorlds sends packets through random worlds.
func TestRandomWorlds(t *testing.T) {
	if !inMachine(t) {
		return
	}
	worlds := 3
	if testtime.Thorough() {
		worlds = 10
	}
	conformance.RunRandom(t, conformance.Options{New: newForWorld, Skip: skips}, conformance.Random{First: *backendtest.Seed, Worlds: worlds, Steps: 3, Packets: 30, For: *backendtest.Soak})
}
