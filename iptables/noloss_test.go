//go:build linux

package iptables

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestNoConnectionIsLost opens connections throughout what a node agent does. All
// pods serve all the time, so that none may fail.
func TestNoConnectionIsLost(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		t.Parallel()
		rounds := 60
		if testing.Short() {
			rounds = 15
		}
		rng := rand.New(rand.NewPCG(3, 3))
		w := conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: newForWorld(flavour)})
		// Some of the pods; at first all, so that the Service is never without.
		hand := func(n int) {
			es := slice(50, tracker.IPv4)
			for _, i := range rng.Perm(len(w.Pods()))[:n] {
				p := w.Pods()[i]
				port := int32(p.Ports()[0])
				es.Ports[0].Port = &port
				es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{p.Addr(tracker.IPv4).String()}, NodeName: &p.Node})
			}
			w.Tracker.SetSlice(es)
		}
		w.Tracker.SetService(svc(50, nodePort(30050)))
		hand(len(w.Pods()))
		w.Sync()
		targets := []conformance.Target{
			{Addr: netip.MustParseAddrPort("10.96.0.50:80"), Protocol: v1.ProtocolTCP},
			{Addr: netip.MustParseAddrPort("192.0.2.1:30050"), Protocol: v1.ProtocolTCP},
		}
		during := func(what string, f func()) {
			t.Helper()
			start := time.Now()
			c := w.Churn(targets, f)
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
				hand(1 + rng.IntN(len(w.Pods())))
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
		during("restarts of the agent, each with changes missed", func() {
			for range rounds / 5 {
				hand(1 + rng.IntN(len(w.Pods())))
				sync(newForWorld(flavour)(t, w.Env))
			}
		})
		during("stale chains of an earlier agent", func() {
			w.Cursor.Resync()
			w.Sync()
		})
	})
}
