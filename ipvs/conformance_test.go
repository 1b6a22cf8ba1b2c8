//go:build linux

package ipvs

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestConformance sends packets through everything the ruleset can say.
func TestConformance(t *testing.T) {
	if !inMachine(t) {
		return
	}
	conformance.Run(t, conformance.Options{New: newForWorld, Skip: notDone})
}

// notDone is what of the suite IPVS cannot do; see "Differences from the other
// backends" in the package documentation.
var notDone = map[conformance.Feature]string{
	conformance.HashOfEndpoints: "the kernel's table follows from the order in which servers came, and has those in it that drain",
	conformance.AffinityNear:    "who comes from near is kept with an endpoint by such a table",
	conformance.LocalErrors:     "IPVS refuses the node's own packets in the output hook, where the kernel returns EPERM to the sender",
	conformance.TrafficAtOnce:   "the kernel sums up its statistics every two seconds",
	conformance.AffinityTimeout: "IPVS remembers a client as long as it knows connections of it, and looks once a minute",
}

func newForWorld(tb testing.TB, env conformance.Env) ruleset.Backend {
	b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		_ = b.Watch(ctx, time.Hour, func(err error) { tb.Errorf("watch: %v", err) })
	}()
	tb.Cleanup(func() {
		if tb.Failed() {
			describe(tb, env)
		}
		cancel()
		<-watched
		b.Close()
	})
	return b
}

// describe logs what is in the kernel.
func describe(tb testing.TB, env conformance.Env) {
	err := env.Do(func() error {
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
