package ruleset

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// Limits holds the limits of a data plane for one Service in one address family. A
// zero field means no limit. The backend decides what happens to a Service that
// exceeds a limit: it programs as much as possible, or rejects the Service with a
// [*PartialError].
type Limits struct {
	// Affinity is the maximum affinity timeout.
	Affinity time.Duration
	// Endpoints is the maximum number of endpoints in a pool.
	Endpoints int
	// AffinityEndpoints is the maximum number of endpoints in a pool with client
	// affinity.
	AffinityEndpoints int
	// WeightedEndpoints is the maximum number of endpoints in a pool whose endpoints
	// have different weights or are chosen by a hash.
	WeightedEndpoints int
	// Delta is about the number of elements ([Port.Cost]) that the data plane changes in 10
	// ms. Deltas are divided by it if it is less than [Budget].Delta, so that no change waits long
	// for another. Full deltas are not divided.
	Delta int
	// Lacks holds what the data plane ignores in every Service.
	Lacks Lacks
}

// Lacks is a set of bits for parts of a Service that a data plane ignores. The zero value
// ignores nothing.
type Lacks uint8

// The bits of Lacks.
const (
	// LacksSourceRanges: every source may use load-balancer IPs.
	LacksSourceRanges Lacks = 1 << iota
	// LacksAffinityTimeout: clients are not forgotten after the affinity timeout.
	LacksAffinityTimeout
	// LacksWeights: all endpoints of a pool get equal shares.
	LacksWeights
	// LacksHash: endpoints are not chosen by a hash.
	LacksHash
	// LacksEndpointPorts: of the endpoints of a pool, only those with one port are used.
	LacksEndpointPorts
)

// in returns the bits of l that matter to s.
func (l Lacks) in(s *Port) (out Lacks) {
	if l == 0 {
		return 0
	}
	set := func(bit Lacks, matters bool) {
		if matters {
			out |= bit & l
		}
	}
	set(LacksSourceRanges, len(s.Spec.SourceRanges) != 0)
	set(LacksAffinityTimeout, s.Spec.Affinity != 0)
	set(LacksHash, s.Hash() != tracker.HashNone)
	for _, t := range poolTargets {
		set(LacksWeights, s.Weighted(t))
		pool := s.Pool(t)
		set(LacksEndpointPorts, slices.ContainsFunc(pool, func(e *tracker.Endpoint) bool { return e.Addr.Port() != pool[0].Addr.Port() }))
	}
	return out
}

// Limiter is a [Backend] that declares its limits. [Engine.Attach] calls Limits once
// per family. When a Service that exceeds a limit is offered to the backend, the
// Engine logs it to [Config].Log and sends an event with
// [tracker.ReasonLimitExceeded]. It does so once, until the Service no longer exceeds
// the limit.
//
// A Backend that wraps another should return the limits of that one: see [LimitsOf].
type Limiter interface {
	Limits(tracker.Family) Limits
}

// LimitsOf returns the limits of b in a family, or the zero Limits if b is not a
// [Limiter].
func LimitsOf(b Backend, f tracker.Family) Limits {
	if l, ok := b.(Limiter); ok {
		return l.Limits(f)
	}
	return Limits{}
}

// excess is a set of bits: one for each limit, and from excessLacks on those of Lacks.
type excess uint16

const (
	excessAffinity excess = 1 << iota
	excessEndpoints
	excessAffinityEndpoints
	excessWeightedEndpoints
	excessLacks
)

// exceeded returns the limits that s exceeds, and texts for those that are not in known. For most
// Services it takes a few comparisons.
func (l *Limits) exceeded(s *Port, known excess) (x excess, news []string) {
	note := func(bit excess, format string, args ...any) {
		if x |= bit; known&bit == 0 {
			news = append(news, fmt.Sprintf(format, args...))
		}
	}
	if l.Affinity != 0 && s.Spec.Affinity > l.Affinity {
		note(excessAffinity, "affinity timeout %v is longer than %v", s.Spec.Affinity, l.Affinity)
	}
	over := func(limit, n int) bool { return limit != 0 && n > limit }
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	if over(l.Endpoints, n) {
		note(excessEndpoints, "%d endpoints are more than %d", n, l.Endpoints)
	}
	if s.Spec.Affinity != 0 && over(l.AffinityEndpoints, n) {
		note(excessAffinityEndpoints, "%d endpoints with client affinity are more than %d", n, l.AffinityEndpoints)
	}
	if over(l.WeightedEndpoints, n) && slices.ContainsFunc(poolTargets[:], func(t Target) bool {
		return over(l.WeightedEndpoints, len(s.Pool(t))) && (s.Hash() != tracker.HashNone || s.Weighted(t))
	}) {
		note(excessWeightedEndpoints, "%d endpoints with weights or a hash are more than %d", n, l.WeightedEndpoints)
	}
	if lacks := l.Lacks.in(s); lacks != 0 {
		for i, text := range [...]string{"loadBalancerSourceRanges are not enforced", "the affinity timeout is ignored", "weights are ignored",
			"the hash is ignored", "endpoints have different ports, and only those with one of them are used"} {
			if lacks&(1<<i) != 0 {
				note(excessLacks<<i, "%s", text)
			}
		}
	}
	return x, news
}

// limited logs and reports the limits that s exceeds and did not exceed before. It
// returns all limits that s exceeds.
func (c *Cursor) limited(s *Port, before excess) excess {
	l := &c.limits[familyIndex(s.Key.Family)]
	if *l == (Limits{}) {
		return 0
	}
	x, news := l.exceeded(s, before)
	if len(news) != 0 {
		what := strings.Join(news, "; ")
		if c.engine.complaints.Write(slog.LevelWarn, complaint.Port(s.Key.Namespace, s.Key.Name, s.Key.String()), "service exceeds a limit of the data plane", "reason", string(tracker.ReasonLimitExceeded), "backend", c.name, "limit", what) {
			c.engine.tracker.Event(s.Key.NamespacedName, true, tracker.ReasonLimitExceeded,
				fmt.Sprintf("port %q (%s): backend %s: %s", complaint.Value(s.Key.Port), s.Key.Family, c.name, what))
		}
	}
	return x
}
