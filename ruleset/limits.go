package ruleset

import (
	"fmt"
	"strings"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// Limits is what a data plane can do at most for one Service, in one address
// family. A zero field means no limit. What happens to a Service that exceeds a
// limit is the backend's choice: it does as much as it can, or refuses the Service
// with a [*PartialError].
type Limits struct {
	// Affinity is the longest affinity timeout.
	Affinity time.Duration
	// Endpoints is the most endpoints of a pool.
	Endpoints int
	// AffinityEndpoints is the most endpoints of a pool with client affinity.
	AffinityEndpoints int
	// WeightedEndpoints is the most endpoints of a pool in which endpoints have
	// different weights or are chosen by a hash.
	WeightedEndpoints int
}

// Limiter is a [Backend] that declares its limits. [Engine.Attach] asks for them
// once. A Service that is offered to the backend and exceeds a limit is reported to
// [Config.Log] and as an event with [tracker.ReasonLimitExceeded], once until it
// no longer exceeds that limit.
//
// A Backend that wraps another should have the limits of that one: see
// [WithLimitsOf].
type Limiter interface {
	Limits(tracker.Family) Limits
}

// LimitsOf returns the limits of b in a family, the zero Limits if b is no [Limiter].
func LimitsOf(b Backend, f tracker.Family) Limits {
	if l, ok := b.(Limiter); ok {
		return l.Limits(f)
	}
	return Limits{}
}

// WithLimitsOf returns a backend that applies b and declares the limits of inner,
// for a b that wraps inner.
func WithLimitsOf(inner, b Backend) Backend { return withLimits{b, inner} }

type withLimits struct {
	Backend
	inner Backend
}

func (w withLimits) Limits(f tracker.Family) Limits { return LimitsOf(w.inner, f) }

// excess is a set of bits that stand for the fields of Limits.
type excess uint8

const (
	excessAffinity excess = 1 << iota
	excessEndpoints
	excessAffinityEndpoints
	excessWeightedEndpoints
)

// exceeded returns which limits s exceeds. Nearly always that takes a few
// comparisons.
func (l *Limits) exceeded(s *Service) (x excess) {
	over := func(limit, n int) bool { return limit != 0 && n > limit }
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	if l.Affinity != 0 && s.Port.Affinity > l.Affinity {
		x |= excessAffinity
	}
	if over(l.Endpoints, n) {
		x |= excessEndpoints
	}
	if s.Port.Affinity != 0 && over(l.AffinityEndpoints, n) {
		x |= excessAffinityEndpoints
	}
	if over(l.WeightedEndpoints, n) {
		for _, t := range []Target{ToCluster, ToLocal} {
			if over(l.WeightedEndpoints, len(s.Pool(t))) && (s.Hash() != tracker.HashNone || s.Weighted(t)) {
				x |= excessWeightedEndpoints
			}
		}
	}
	return x
}

// describe names the limits of x that s exceeds.
func (l *Limits) describe(s *Service, x excess) string {
	var out []string
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	if x&excessAffinity != 0 {
		out = append(out, fmt.Sprintf("affinity timeout %v is longer than %v", s.Port.Affinity, l.Affinity))
	}
	for _, e := range []struct {
		bit   excess
		limit int
		what  string
	}{
		{excessEndpoints, l.Endpoints, ""},
		{excessAffinityEndpoints, l.AffinityEndpoints, " with client affinity"},
		{excessWeightedEndpoints, l.WeightedEndpoints, " with weights or a hash"},
	} {
		if x&e.bit != 0 {
			out = append(out, fmt.Sprintf("%d endpoints%s are more than %d", n, e.what, e.limit))
		}
	}
	return strings.Join(out, "; ")
}

// limited reports what s exceeds and did not exceed before.
func (c *Cursor) limited(s *Service, before excess) excess {
	l := &c.limits[familyIndex(s.Key.Family)]
	if *l == (Limits{}) {
		return 0
	}
	x := l.exceeded(s)
	if news := x &^ before; news != 0 {
		what := l.describe(s, news)
		c.engine.log.Warn("service exceeds a limit of the data plane", "backend", c.name, "service", s.Key, "limit", what)
		c.engine.tracker.Event(s.Key.NamespacedName, true, tracker.ReasonLimitExceeded,
			fmt.Sprintf("port %q (%s): backend %s: %s", s.Key.Port, s.Key.Family, c.name, what))
	}
	return x
}
