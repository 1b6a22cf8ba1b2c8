// Package backendtest holds common parts of the tests of the nftables, iptables and ipvs
// backends: API objects, the pipeline that drives a backend, the steps of a backend's life,
// and agents that are killed under traffic.
package backendtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Pipeline is a tracker, which is marked as synced, and its engine.
type Pipeline struct {
	Tracker *tracker.Tracker
	Engine  *ruleset.Engine
}

// NewPipeline returns a Pipeline. It sets the engine's Tracker.
func NewPipeline(t tracker.Config, e ruleset.Config) (*Pipeline, error) {
	var p Pipeline
	var err error
	if p.Tracker, err = tracker.New(t); err != nil {
		return nil, err
	}
	e.Source = p.Tracker
	if p.Engine, err = ruleset.NewEngine(e); err != nil {
		return nil, err
	}
	p.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return &p, nil
}

// Life holds the steps of a backend's life, for [Life.Run].
type Life struct {
	// Cursor is the backend's cursor.
	Cursor *ruleset.Cursor
	// Change makes a change, after the first full delta.
	Change func()
	// Tend, if not nil, is called after the change.
	Tend func(context.Context) error
	// Check is the backend's method.
	Check func(context.Context) error
	// Inspect, if not nil, is called before the clean-up.
	Inspect func(context.Context) error
	// Owned, if not nil, must report true before the clean-up.
	Owned func(context.Context) (bool, error)
	// Cleanup removes everything. Afterwards Check must fail with [ruleset.ErrNeedFull].
	Cleanup func(context.Context) error
}

// Run makes a backend do all its steps, from the first full delta to the clean-up.
func (l Life) Run(ctx context.Context) error {
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"first full delta", l.Cursor.Sync},
		{"change", func(ctx context.Context) error { l.Change(); return l.Cursor.Sync(ctx) }},
		{"tend", l.Tend},
		{"check", l.Check},
		{"full delta", func(ctx context.Context) error { l.Cursor.Resync(); return l.Cursor.Sync(ctx) }},
		{"inspect", l.Inspect},
		{"owned", func(ctx context.Context) error {
			owned, err := l.Owned(ctx)
			if err == nil && !owned {
				err = errors.New("nothing is owned")
			}
			return err
		}},
		{"clean-up", l.Cleanup},
		{"check after clean-up", func(ctx context.Context) error {
			if err := l.Check(ctx); !errors.Is(err, ruleset.ErrNeedFull) {
				return fmt.Errorf("error is %v, want ErrNeedFull", err)
			}
			return nil
		}},
	} {
		if step.do == nil {
			continue
		}
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// Flags of the tests with random worlds.
var (
	// Soak is the time for further worlds.
	Soak = flag.Duration("soak", 0, "run further worlds of TestRandomWorlds for this `time`")
	// Seed is the seed of the first world.
	Seed = flag.Uint64("seed", 1, "`seed` of the first world of TestRandomWorlds, and of random changes")
)

// ThisNode is the name of the node of [NewNode].
const ThisNode = "node-a"

// nodeAddrs are the node's addresses.
var nodeAddrs = []netip.Addr{netip.MustParseAddr("192.168.7.1"), netip.MustParseAddr("fd00:7::1")}

// NewNode returns the pipeline of a dual-stack node that recognizes its pods by address
// ranges. It sets the node of c.
func NewNode(tb testing.TB, c tracker.Config) *Pipeline {
	tb.Helper()
	c.Node = tracker.NodeInfo{Name: ThisNode, Zone: "z1", Addresses: nodeAddrs}
	p, err := NewPipeline(c, ruleset.Config{
		LocalTraffic: ruleset.LocalTraffic{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/108")},
	})
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// ServiceName returns the name of Service number i.
func ServiceName(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("svc-%d", i)}
}

// UpTo returns 1 to n.
func UpTo(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i + 1
	}
	return out
}
