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

// Limits holds the limits of a data plane for one Service in one address family. A zero field means no limit. The
// [Cursor] ensures the first four (see [Limits.Hold]), so the backend need not check them.
type Limits struct {
	// Affinity is the maximum affinity timeout. Services with a longer one get this one.
	Affinity time.Duration
	// Endpoints is the maximum number of endpoints in a pool. The first ones, in the order of
	// [Port.Pool], are kept.
	Endpoints int
	// AffinityEndpoints is the same for a pool with client affinity.
	AffinityEndpoints int
	// WeightedEndpoints is the same for a pool whose endpoints have different weights or are
	// chosen by a hash.
	WeightedEndpoints int
	// Delta is about the number of elements ([Port.Cost]) that the data plane changes in 10 ms. If it is less than
	// [Budget].Delta, deltas other than Full ones are divided by it.
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

// Limiter is a [Backend] that declares its limits. [Engine.Attach] calls Limits once per family. [Cursor.Sync] logs a
// Service that exceeds a limit to [Config].Log and sends an event with [tracker.ReasonLimitExceeded], once until the
// Service no longer exceeds it. [Port].LeftOut of what [Cursor.Port] and [Cursor.Lookup] return names the limit, too.
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

func over(limit, n int) bool { return limit != 0 && n > limit }

// fits reports, in a few comparisons, whether s certainly exceeds no limit that Hold holds.
func (l *Limits) fits(s *Port) bool {
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	return (l.Affinity == 0 || s.Spec.Affinity <= l.Affinity) &&
		!over(l.Endpoints, n) && !over(l.AffinityEndpoints, n) && !over(l.WeightedEndpoints, n)
}

// Hold returns s within l: s itself, or a version with a shorter affinity timeout and the first endpoints of its
// pools, whose LeftOut names the limits. The result depends only on l and s. A program that renders a [Snapshot]
// without a Cursor calls it.
func (l Limits) Hold(s *Port) *Port {
	if s == nil || l.fits(s) {
		return s
	}
	l.Lacks = 0
	x, texts := l.exceeded(s, 0)
	if x == 0 {
		return s
	}
	first := func(t Target) []*tracker.Endpoint {
		pool := s.Pool(t)
		n := len(pool)
		for _, most := range []struct {
			limit   int
			applies bool
		}{{l.Endpoints, true}, {l.AffinityEndpoints, s.Spec.Affinity != 0}, {l.WeightedEndpoints, s.numbered(t)}} {
			if most.applies && over(most.limit, n) {
				n = most.limit
			}
		}
		return pool[:n]
	}
	largest := func(s *Port) int { return max(len(s.Selection.Cluster), len(s.Selection.Local)) }
	out := *withPools(s, first(TargetCluster), first(TargetLocal))
	if x&excessAffinity != 0 {
		spec := *s.Spec
		spec.Affinity = l.Affinity
		out.Spec = &spec
	}
	left := LeftOut{}
	if s.LeftOut != nil {
		left = *s.LeftOut
		texts = append([]string{left.Text}, texts...)
	}
	left.Endpoints += largest(s) - largest(&out)
	left.Text = strings.Join(texts, "; ")
	out.LeftOut = &left
	return &out
}

// numbered reports whether the endpoints of a pool have different weights or are chosen by a hash.
func (s *Port) numbered(t Target) bool { return s.Hash() != tracker.HashNone || s.Weighted(t) }

// exceeded returns the limits that s exceeds, and texts for those that are not in known.
func (l *Limits) exceeded(s *Port, known excess) (x excess, news []string) {
	note := func(bit excess, format string, args ...any) {
		if x |= bit; known&bit == 0 {
			news = append(news, fmt.Sprintf(format, args...))
		}
	}
	if l.Affinity != 0 && s.Spec.Affinity > l.Affinity {
		note(excessAffinity, "affinity timeout %v is longer than %v", s.Spec.Affinity, l.Affinity)
	}
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	if over(l.Endpoints, n) {
		note(excessEndpoints, "%d endpoints are more than %d", n, l.Endpoints)
	}
	if s.Spec.Affinity != 0 && over(l.AffinityEndpoints, n) {
		note(excessAffinityEndpoints, "%d endpoints with client affinity are more than %d", n, l.AffinityEndpoints)
	}
	if over(l.WeightedEndpoints, n) && slices.ContainsFunc(poolTargets[:], func(t Target) bool {
		return over(l.WeightedEndpoints, len(s.Pool(t))) && s.numbered(t)
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

// cut is a Service that may exceed the limits of a Cursor, and what the backend is offered of it.
type cut struct{ of, port *Port }

// hold returns s, the version of id that the backend should have, within the backend's limits: the same pointer for
// the same s.
func (c *Cursor) hold(id uint32, s *Port) *Port {
	if s == nil || c.limits[familyIndex(s.Key.Family)].fits(s) {
		delete(c.cut, id)
		return s
	}
	if c.cut[id].of != s {
		if c.cut == nil {
			c.cut = map[uint32]cut{}
		}
		c.cut[id] = cut{s, c.limits[familyIndex(s.Key.Family)].Hold(s)}
	}
	return c.cut[id].port
}

// limited reports the limits that s exceeds and did not exceed before. It returns all that s exceeds.
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
