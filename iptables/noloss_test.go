//go:build linux

package iptables

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestChangesAndRestartsLoseNoConnection opens connections during everything that a node agent
// does. All pods serve all the time, so none may fail.
func TestChangesAndRestartsLoseNoConnection(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		rounds := 60
		if !testtime.Thorough() {
			rounds = 15
		}
		rng := rand.New(rand.NewPCG(3, 3))
		w := conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: newForWorld(flavor)})
		w.Tracker.SetService(svc(50, nodePort(30050)))
		setPods(w, len(w.Pods()), rng)
		w.Sync()
		during := func(what string, f func()) {
			t.Helper()
			start := time.Now()
			c := w.Churn(podTargets, f)
			t.Logf("%s: %d connections in %v, %d failed", what, c.Opened, time.Since(start).Round(time.Millisecond), len(c.Failures))
			for _, err := range c.Failures[:min(len(c.Failures), 5)] {
				t.Errorf("%s: %v", what, err)
			}
		}
		sync := func(b ruleset.Backend) {
			if err := w.Do(func() error {
				c := w.Engine.Attach("another", b)
				defer c.Detach()
				return c.Sync(context.Background())
			}); err != nil {
				t.Error(err)
			}
		}
		during("endpoint changes", func() {
			for range rounds {
				setPods(w, 1+rng.IntN(len(w.Pods())), rng)
				w.Sync()
			}
		})
		during("growing to a tree of chains and back", func() {
			for i := range firstRules + 30 {
				w.Tracker.SetService(svc(500+i, nodePort(31000+int32(i))))
				if i%10 == 9 {
					w.Sync()
				}
			}
			for i := range firstRules + 30 {
				w.Tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: svc(500 + i).Name})
				if i%10 == 9 {
					w.Sync()
				}
			}
		})
		during("full resyncs", func() {
			for range rounds / 5 {
				w.Cursor.Resync()
				w.Sync()
			}
		})
		during("restarts of the agent, each with missed changes", func() {
			for range rounds / 5 {
				setPods(w, 1+rng.IntN(len(w.Pods())), rng)
				sync(newForWorld(flavor)(t, w.Env))
			}
		})
		during("stale chains of an earlier agent", func() {
			w.Cursor.Resync()
			w.Sync()
		})
	})
}
