//go:build linux

package iptables

import (
	"errors"
	"log/slog"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// HashFallback is what becomes of a Service whose endpoints are to follow from a
// hash (see [ruleset.Service.Hash]). iptables has no match that could do that.
type HashFallback uint8

const (
	// HashAsRandom has endpoints drawn at random, by their weights, as if no hash were
	// asked for. It is logged when a Service begins to ask.
	HashAsRandom HashFallback = iota
	// HashRefused has the Service fail with [ErrHash]. It stays as it was, or is not
	// there.
	HashRefused
)

// ErrHash is in the error of a Service that is refused because its endpoints are
// to follow from a hash.
var ErrHash = errors.New("iptables: endpoints cannot be chosen by a hash")

// announce logs which Services ask for a hash now, and did not before, and are not
// refused.
func (f *family) announce(changes []ruleset.Change) {
	for _, c := range changes {
		if f.refuseHash || c.New == nil || c.New.Hash() == tracker.HashNone {
			continue
		}
		if c.Old == nil || c.Old.Hash() != c.New.Hash() {
			f.log.Warn("iptables: endpoints are chosen at random, not by a hash",
				slog.String("service", c.Key.String()), slog.String("hash", c.New.Hash().String()))
		}
	}
}
