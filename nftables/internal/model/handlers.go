package model

import (
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
)

// targets are the targets that have a pool.
var targets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// StickyTargets tells, by target, whether a Service's pool is sticky.
type StickyTargets [ruleset.TargetLocal + 1]bool

// WantedSticky returns the targets whose pools should be sticky: all of a Service with client
// affinity.
func WantedSticky(s *ruleset.Port) (out StickyTargets) {
	for _, target := range targets {
		out[target] = s.Spec.Affinity != 0
	}
	return out
}

// HandlerOf returns the handler of a frontend of the Service.
func HandlerOf(s *ruleset.Port, f *ruleset.Frontend, sticky StickyTargets) layout.Handler {
	var h layout.Handler
	if f.Target == ruleset.TargetCluster || f.Target == ruleset.TargetLocal {
		h = PoolHandler(s, f, f.Target, sticky)
	}
	h.Range = f.IsRange()
	h.Firewall = len(f.Sources) != 0
	switch {
	case f.Target == ruleset.TargetReject:
		h.Handling = layout.HandleReject
	case f.Target == ruleset.TargetDrop && f.Internal == ruleset.TargetCluster:
		h.Handling = layout.HandleInternalOrDrop
	case f.Target == ruleset.TargetPass:
		h.Handling = layout.HandleInternalOrPass
	case f.Target == ruleset.TargetDrop:
		h.Handling = layout.HandleDrop
	case f.Masquerade == ruleset.MasqueradeAlways:
		h.Handling = layout.HandleAlways
	case f.Masquerade == ruleset.MasqueradeNotPods:
		h.Handling = layout.HandleNotPods
	case f.Masquerade == ruleset.MasqueradeNode:
		h.Handling = layout.HandleInternal
	}
	return h
}

// HasInternalHandler reports whether internal traffic to the frontend has a handler of its own,
// which sends to the pool of [ruleset.TargetCluster].
func HasInternalHandler(f *ruleset.Frontend) bool {
	return f.ShortCircuit() && f.Internal == ruleset.TargetCluster
}

// PoolHandler returns the handler that only sends connections to the frontend to the Service's pool
// for a target.
func PoolHandler(s *ruleset.Port, f *ruleset.Frontend, t ruleset.Target, sticky StickyTargets) layout.Handler {
	if sticky[t] {
		return layout.Handler{Sticky: true, Range: f.IsRange()}
	}
	return layout.Handler{Buckets: handlerBuckets(s, t), Hash: s.Hash(), Range: f.IsRange()}
}

// StickyHandlerOf returns the handler of the Service's sticky pool for a target.
func StickyHandlerOf(s *ruleset.Port, t ruleset.Target) layout.StickyHandler {
	return layout.StickyHandler{Buckets: handlerBuckets(s, t), Hash: s.Hash(), Seconds: layout.Seconds(s.Spec.Affinity)}
}
