package iptables

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/tracker"
)

// TestServiceWithHashIsServedAtRandom applies a Service that asks for a hash. It must be
// programmed without the hash, and logged once for each family.
func TestServiceWithHashIsServedAtRandom(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		var log bytes.Buffer
		r := newRig(t, flavor, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
		n := backendtest.NewNode(t, tracker.Config{OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			if s.Name == svc(0).Name {
				p.Hash = tracker.HashSource
			}
			return nil
		}})
		r.tracker, r.engine = n.Tracker, n.Engine
		r.start()
		for i := range 2 {
			r.set(i, []int{1, 2})
		}
		for range 2 {
			r.sync()
			r.verify()
			r.cursor.Resync()
		}
		if logged := strings.Count(log.String(), "chosen at random"); logged != 2 {
			t.Errorf("logged %d times:\n%s", logged, log.String())
		}
	}, NFT)
}
