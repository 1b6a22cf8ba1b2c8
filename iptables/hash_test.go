//go:build linux

package iptables

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestServiceWithHashIsRefusedOrLogged applies a Service that asks for a hash. It must be
// refused alone, or programmed without the hash and logged once.
func TestServiceWithHashIsRefusedOrLogged(t *testing.T) {
	t.Parallel()
	for _, refuse := range []bool{false, true} {
		var log bytes.Buffer
		r := newRig(t, NFT, func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(&log, nil))
			if refuse {
				c.Hash = HashRefused
			}
		})
		var err error
		r.tracker, err = tracker.New(tracker.Config{OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			if s.Name == svc(0).Name {
				p.Hash = tracker.HashSource
			}
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		r.engine, err = ruleset.NewEngine(ruleset.Config{Tracker: r.tracker})
		if err != nil {
			t.Fatal(err)
		}
		r.tracker.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
		r.start()
		for i := range 2 {
			r.tracker.SetService(svc(i))
			r.tracker.SetSlice(slice(i, tracker.IPv4, 1, 2))
		}
		for range 2 {
			err = r.cursor.Sync(context.Background())
			var partial *ruleset.PartialError
			switch {
			case !refuse && err != nil:
				t.Fatal(err)
			case refuse && (!errors.Is(err, ErrHash) || !errors.As(err, &partial) || len(partial.Failed) != 2):
				t.Fatalf("Sync: %v, want ErrHash for the Service in both families", err)
			}
			r.cursor.Resync()
		}
		logged := strings.Count(log.String(), "chosen at random")
		if refuse && logged != 0 || !refuse && logged != 2 {
			t.Errorf("refused %t: logged %d times:\n%s", refuse, logged, log.String())
		}
		for i := range 2 {
			s, _ := r.engine.Snapshot().Lookup(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), 80), v1.ProtocolTCP)
			want := !refuse || i == 1
			if has := strings.Contains(dump(t, r.backend), prefixService+hashOf(serviceID(s.Key))); has != want {
				t.Errorf("refused %t: Service %d has chains: %t", refuse, i, has)
			}
		}
	}
}
