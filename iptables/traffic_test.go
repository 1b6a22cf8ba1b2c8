//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestEveryConnectionIsCounted makes connections while endpoints change and other processes
// take over, and compares their number with the counters.
func TestEveryConnectionIsCounted(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		config := testConfig(t, flavor)
		config.CountTraffic, config.Families = true, []tracker.Family{tracker.IPv4}
		var b *Backend
		open := func(tb testing.TB, env conformance.Env) ruleset.Backend {
			config.NetNS = env.NetNS
			var err error
			if b, err = New(context.Background(), config); err != nil {
				tb.Fatal(err)
			}
			tb.Cleanup(func() { b.Close() })
			return b
		}
		w := conformance.NewWorld(t, conformance.Options{Families: config.Families, New: open})
		if _, err := Traffic(t.Context(), config); !errors.Is(err, dataplane.ErrNoRules) {
			t.Errorf("without rules: %v, want ErrNoRules", err)
		}
		rng := rand.New(rand.NewPCG(3, 3))
		w.Tracker.SetService(svc(50, nodePort(30050)))
		setPods(w, len(w.Pods()), rng)
		w.Sync()
		connections := func() int {
			t.Helper()
			got := must.Get(b.Traffic(t.Context()))(t)
			read := must.Get(Traffic(t.Context(), config))(t)
			sum := func(t *dataplane.Traffic) (n int) {
				for k, c := range t.Services {
					if k.Name == svc(50).Name && k.Protocol == v1.ProtocolTCP && k.Family == tracker.IPv4 {
						n += int(c.Connections)
					}
				}
				return n
			}
			if fmt.Sprint(got.Services) != fmt.Sprint(read.Services) && len(b.families[0].kept) == 0 {
				t.Errorf("the backend returns %v, Traffic %v", got.Services, read.Services)
			}
			return sum(got)
		}
		during := func(what string, rounds, lost int, f func(i int)) {
			t.Helper()
			before := connections()
			c := w.Churn(podTargets, func() {
				for i := range rounds {
					f(i)
				}
			})
			if len(c.Failures) != 0 {
				t.Fatalf("%s: %v", what, c.Failures[0])
			}
			missing := before + c.Opened - connections()
			t.Logf("%s: %d connections, %d of them not counted", what, c.Opened, missing)
			if missing < 0 || missing > rounds*lost {
				t.Errorf("%s: %d of %d connections were not counted, at most %d may be", what, missing, c.Opened, rounds*lost)
			}
		}
		during("no change", 1, 0, func(int) {})
		during("other Services", 5, 0, func(i int) {
			w.Tracker.SetService(svc(500+i, nodePort(31000+int32(i))))
			w.Sync()
		})
		during("endpoint changes", 10, 1000, func(int) {
			setPods(w, 1+rng.IntN(len(w.Pods())), rng)
			w.Sync()
		})
		during("restarts", 3, 0, func(int) {
			w.Cursor.Detach()
			must.Do(t, w.Do(func() error { open(t, w.Env); return nil }))
			w.Cursor = w.Engine.Attach("another", b)
			w.Sync()
		})
		// Without new connections, the counters must not change.
		before := connections()
		for i := range 6 {
			setPods(w, i%3, rng)
			w.Sync()
			if now := connections(); now != before {
				t.Errorf("with %d endpoints: %d connections, were %d", i%3, now, before)
			}
		}
	})
}
