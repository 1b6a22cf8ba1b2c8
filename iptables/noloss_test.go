//go:build linux

package iptables

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/usage"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/runner"
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

var (
	flood     = flag.Duration("flood", 0, "how long TestFloodLosesNoConnection changes objects, by default 1s, or 2s in its long form")
	services  = flag.Int("services", 150, "how many Services TestFloodLosesNoConnection has")
	thousands = flag.Bool("thousands", false, "create thousands of Services with iptables-nft, too, in TestChangesLeakNothing")
)

// TestFloodLosesNoConnection changes a thousand objects a second while it opens connections.
// None may fail, and the tables must be right in the end.
func TestFloodLosesNoConnection(t *testing.T) {
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		const rate = 1000
		length := cmp.Or(*flood, time.Second)
		if *flood == 0 && testtime.Thorough() {
			length = 2 * time.Second
		}
		rng := rand.New(rand.NewPCG(6, 6))
		w := conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: newForWorld(flavor)})
		w.Tracker.SetService(svc(50, nodePort(30050)))
		setPods(w, len(w.Pods()), rng)
		for i := range *services {
			w.Tracker.SetService(svc(1000 + i))
			w.Tracker.SetSlice(slice(1000+i, tracker.IPv4, rng.Perm(200)[:3]...))
		}
		w.Sync()
		before := usage.Heap()
		syncs, longest := 0, time.Duration(0)
		r, err := runner.New(runner.Config{Min: 50 * time.Millisecond, Retry: time.Second, Max: time.Hour, Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) {
			syncs++
			if !i.QueuedAt.IsZero() {
				longest = max(longest, i.Start.Add(i.Duration).Sub(i.QueuedAt))
			}
			if i.Err != nil {
				t.Error(i.Err)
			}
		}}}, func(context.Context) error { return w.Do(func() error { return w.Cursor.Sync(context.Background()) }) })
		if err != nil {
			t.Fatal(err)
		}
		w.Tracker.Notify(r.Trigger)
		held, changes := w.Hold(podTargets), 0
		c := w.Churn(podTargets, func() {
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- r.Run(ctx) }()
			for start := time.Now(); time.Since(start) < length; time.Sleep(10 * time.Millisecond) {
				for range min(int(time.Since(start).Seconds()*rate)-changes, rate/4) {
					changes++
					i := 1000 + rng.IntN(*services)
					switch rng.IntN(10) {
					case 0:
						setPods(w, 1+rng.IntN(len(w.Pods())), rng)
					case 1:
						w.Tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: svc(i).Name})
					case 2:
						w.Tracker.SetService(svc(i))
					default:
						w.Tracker.SetSlice(slice(i, tracker.IPv4, rng.Perm(200)[:rng.IntN(6)]...))
					}
				}
			}
			stop()
			<-done
			w.Sync()
		})
		t.Logf("%d changes and %d syncs among %d Services, the longest wait was %v; %d connections, %d failed; heap %d MB before, %d after",
			changes, syncs, *services, longest.Round(time.Millisecond), c.Opened, len(c.Failures), before>>20, usage.Heap()>>20)
		for _, err := range append(c.Failures[:min(len(c.Failures), 5)], held.Check()) {
			if err != nil {
				t.Error(err)
			}
		}
		// A cold start writes nothing.
		o := &rig{TB: t, flavor: onLinux(flavor), node: &linuxNode{}, config: testConfig(t, flavor), tracker: w.Tracker, engine: w.Engine}
		o.config.NetNS, o.config.Families = w.Env.NetNS, w.Env.Families
		o.start()
		defer o.backend.Close()
		found := dump(t, o.backend)
		o.sync()
		if after := dump(t, o.backend); after != found {
			t.Errorf("after a cold start\n%.2000s\nbefore\n%.2000s", after, found)
		}
	})
}

// TestChangesLeakNothing creates and removes Services and backends twice. The second time
// must not use more resources than the first.
func TestChangesLeakNothing(t *testing.T) {
	// Not parallel, because other tests have goroutines and files, too.
	flavors(t, func(t *testing.T, flavor Flavor) {
		cycles, services := 20, 100
		if !*thousands && (flavor == NFT || !testtime.Thorough()) { // takes minutes
			cycles, services = 4, 30
		}
		r := newRig(t, onLinux(flavor), onlyIPv4)
		r.set(0, []int{1, 2, 3})
		r.sync()
		work := func(first int) {
			for n := range cycles {
				for i := range services {
					s := svc(100+i, nodePort(30000+int32(i)), affinity(int32(1+(n+i)%3)))
					s.Name = fmt.Sprintf("job-%d-%d", first+n, i) // a name that never comes back
					es := slice(0, tracker.IPv4, (first+n+i)%999, (first+n+i)%999+1)
					es.Name, es.Labels["kubernetes.io/service-name"] = s.Name, s.Name
					r.tracker.SetService(s)
					r.tracker.SetSlice(es)
				}
				r.sync()
				for i := range services {
					name := types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("job-%d-%d", first+n, i)}
					r.tracker.DeleteService(name)
					r.tracker.DeleteSlice(name)
				}
				r.sync()
				r.start()
				r.sync()
				r.node.calls() // the record of them grows
			}
		}
		work(0)
		tables := fmt.Sprint(r.kernel(tracker.IPv4))
		before := usage.Now()
		work(cycles)
		before.Keep(t, 200<<10)
		if now := fmt.Sprint(r.kernel(tracker.IPv4)); now != tables {
			t.Errorf("the tables are\n%s\nwant\n%s", now, tables)
		}
		r.verify()
	})
}
