//go:build linux

package iptables

import (
	"errors"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestProbeLeavesNothing(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		t.Parallel()
		w := &watched{tb: t, dir: t.TempDir()}
		r := newRig(t, flavour, w.through)
		before := save(r)
		if err := Probe(t.Context(), r.config); err != nil {
			t.Error(err)
		}
		w.set("refuse", "--probability")
		err := Probe(t.Context(), r.config)
		w.set("", "")
		var unsupported *ruleset.UnsupportedError
		var command *CommandError
		if !errors.As(err, &unsupported) || unsupported.Backend != "iptables" || unsupported.Family != tracker.IPv4 || !errors.As(err, &command) {
			t.Errorf("without a match that Services need: %v, want an UnsupportedError and a CommandError", err)
		}
		if after := save(r); after != before {
			t.Errorf("after Probe\n%s\nbefore\n%s", after, before)
		}
	})
}

func TestCheckBeforeTheFirstApplyReportsDrift(t *testing.T) {
	needFlavour(t, NFT)
	t.Parallel()
	r := newRig(t, NFT)
	var drift *ruleset.DriftError
	if err := r.backend.Check(t.Context()); !errors.As(err, &drift) {
		t.Errorf("Check: %v, want a DriftError", err)
	}
	r.sync()
	if err := r.backend.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
