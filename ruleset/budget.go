package ruleset

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// Budget bounds what Services may cost a data plane, so that the objects of one user do not
// take time and memory from those of others. Port and Service count what the API has:
// each endpoint of a port and each frontend, once. Namespace and Total count the elements that a data plane needs: see [Port.Cost]. In all fields zero means
// no bound; [DefaultBudget] suits a node.
//
// A Service port that exceeds a bound is served as far as the bound allows: see [LeftOut].
// What is left out depends only on the objects, the node and the Budget, and not on their
// history. Endpoints that are gone leave the rules. The Engine logs the excess to [Config].Log
// and sends an event with [tracker.ReasonLimitExceeded].
type Budget struct {
	// Port is the maximum number of endpoints of one port of a Service in one family. The last
	// ones are left out.
	Port int
	// Service is the maximum number of endpoints and frontends of all ports of a Service in both
	// families. Each port may have an equal share. The last frontends are left out if they are
	// more than a fifth of it, and then the last endpoints.
	Service int
	// Namespace is the maximum cost of all Services of one namespace, so that the users of a
	// namespace cannot use up Total alone. If all ports together cost more, each gets up to 16
	// elements, and then the elements that it needs, in the order of the age of their Services
	// and then of their keys, until none is left. A port that gets fewer than it needs gives up
	// its hash and its weights, so that endpoints are chosen at random, then the last frontends
	// if they need more than a fifth of its elements, and then the last endpoints. A port that
	// gets none has no rules.
	Namespace int
	// Total is the maximum cost of all Services. If they cost more, the namespaces that cost
	// most get an equal number of elements each, which they divide as those of Namespace.
	// So a namespace that costs less than an equal part of Total always gets all it needs.
	Total int
	// Buckets is the maximum number of buckets of a hash table. A larger table gets the
	// largest size in the Budget. A pool with more endpoints than that gets the smallest table
	// that has a bucket for each endpoint.
	Buckets int
	// BucketsPerEndpoint is the maximum number of buckets for each endpoint of a table
	// whose size [tracker.ServicePort].HashBuckets determines.
	BucketsPerEndpoint int
	// Delta is about the most elements that one delta changes, unless it is Full or a 32nd of
	// all that waits is more. Syncs divide larger changes into several deltas: see
	// [Cursor.Sync]. For a backend with a smaller [Limits].Delta, that counts.
	Delta int
	// Cost, if not nil, replaces [Port.Cost], for data planes that need more elements.
	// Leaving out endpoints, frontends, weights or the hash must not raise the cost. It must
	// not call the Engine or a Cursor, which would wait forever.
	Cost func(*Port) int
}

// DefaultBudget returns a Budget for a node: 20,000 endpoints for a port in a family, 500,000
// endpoints and frontends for a Service, 1,250,000 elements for a namespace, 5,000,000 in all, tables
// of at most 4,093 buckets and 256 for each endpoint, and deltas of 1,000 elements.
func DefaultBudget() Budget {
	return Budget{
		Port: 20_000, Service: 500_000, Namespace: 1_250_000, Total: 5_000_000,
		Buckets: 4093, BucketsPerEndpoint: 256, Delta: 1_000,
	}
}

func (b *Budget) validate() error {
	for _, n := range []int{b.Port, b.Service, b.Namespace, b.Total, b.Buckets, b.BucketsPerEndpoint, b.Delta} {
		if n < 0 {
			return fmt.Errorf("%d is negative", n)
		}
	}
	return nil
}

func (b *Budget) cost(s *Port) int {
	if b.Cost != nil {
		return b.Cost(s)
	}
	return s.Cost()
}

// Cost returns the number of elements that a data plane typically needs for s: one for each
// frontend, one for each of its sources, one for each endpoint or bucket of a pool, and one
// more for each endpoint with client affinity.
func (s *Port) Cost() int {
	n := frontendsCost(s)
	for _, t := range []Target{TargetCluster, TargetLocal} {
		pool := s.Pool(t)
		switch {
		case len(pool) == 0:
		case s.Hash() != tracker.HashNone:
			n += s.HashBuckets(t)
		case s.Weighted(t):
			n += TotalShares(pool)
		default:
			n += len(pool)
		}
		if s.Spec.Affinity != 0 {
			n += len(pool)
		}
	}
	return n
}

// frontendsCost returns the part of [Port.Cost] for the frontends.
func frontendsCost(s *Port) (n int) {
	for i := range s.Frontends {
		n += 1 + len(s.Frontends[i].Sources)
	}
	return n
}

// partsOf returns the number of endpoints and frontends of s, each counted once.
func partsOf(s *Port) int { return len(s.Frontends) + len(s.Selection.Reachable) }

// limit returns s as far as the bounds on one Service allow, and what they leave out, nil for
// nothing. ports is the number of the Service's ports in both families.
func (b *Budget) limit(s *Port, ports int) (*Port, *LeftOut) {
	var out omissions
	s = b.limitTable(s, &out)
	if n := s.Spec.SourceRangesLeftOut; n != 0 {
		out.bound("it has too many source ranges")
		out.note("%d source ranges", n)
		out.Sources = n
	}
	if n := len(s.Selection.Reachable); b.Port != 0 && n > b.Port {
		s = fewerEndpoints(s, func(s *Port) bool { return len(s.Selection.Reachable) > b.Port }, &out)
		out.bound("it has %d endpoints, at most %d are allowed", n, b.Port)
	}
	if share := max(2, b.Service/max(1, ports)); b.Service != 0 && partsOf(s) > share {
		out.bound("it has %d endpoints and frontends, at most %d are allowed", partsOf(s), share)
		s = fewerFrontends(s, func(s *Port) bool { return partsOf(s) > share/5 }, &out)
		s = fewerEndpoints(s, func(s *Port) bool { return partsOf(s) > share }, &out)
	}
	return s, out.result()
}

// fit returns s if it costs at most the given number of elements. Otherwise it returns a version
// of s that does, or nil if even one frontend with one endpoint costs more, and what it leaves out
// in addition to left. whose names the Services that together are beyond the Budget.
func (b *Budget) fit(s *Port, most int, whose string, left *LeftOut) (*Port, *LeftOut) {
	cost := b.cost(s)
	if cost <= most {
		return s, left
	}
	all := s
	out := omissions{LeftOut: left.clone()}
	out.bound("beyond the budget of %s: it costs %d elements, at most %d are left", whose, cost, most)
	over := func(s *Port) bool { return b.cost(s) > most }
	if s.Hash() != tracker.HashNone {
		s = withTable(s, 0)
		out.note("the hash")
	}
	if over(s) && !s.uniform && (s.Weighted(TargetCluster) || s.Weighted(TargetLocal)) {
		c := *s
		c.uniform = true
		s = &c
		out.note("the weights")
	}
	if over(s) {
		s = fewerFrontends(s, func(s *Port) bool { return b.cost(s) > most/5 }, &out)
		s = fewerEndpoints(s, over, &out)
	}
	if over(s) {
		out = omissions{LeftOut: left.clone()}
		out.bound("beyond the budget of %s: it costs %d elements, at most %d are left", whose, cost, most)
		out.note("all rules")
		out.Frontends = append(slices.Clip(all.Frontends), out.Frontends...)
		out.Endpoints += len(all.Selection.Reachable)
		return nil, out.result()
	}
	return s, out.result()
}

// fewerFrontends returns s without the last frontends that make it too large, even with one
// endpoint in each pool. It keeps one.
func fewerFrontends(s *Port, over func(*Port) bool, out *omissions) *Port {
	n := len(s.Frontends)
	keep := max(1, sort.Search(n, func(m int) bool { return over(withEndpoints(withFrontends(s, m+1), 1)) }))
	if keep >= n {
		return s
	}
	out.note("%d of %d frontends", n-keep, n)
	out.Frontends = append(slices.Clip(s.Frontends[keep:]), out.Frontends...)
	return withFrontends(s, keep)
}

// fewerEndpoints returns s without the last endpoints of each pool that make it too large. It
// keeps one.
func fewerEndpoints(s *Port, over func(*Port) bool, out *omissions) *Port {
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	if n < 2 || !over(s) {
		return s
	}
	keep := max(1, sort.Search(n, func(k int) bool { return over(withEndpoints(s, k+1)) }))
	out.note("%d of %d endpoints", n-keep, n)
	out.Endpoints += n - keep
	return withEndpoints(s, keep)
}

// limitTable returns s with a hash table within the Budget.
func (b *Budget) limitTable(s *Port, out *omissions) *Port {
	if s.Hash() == tracker.HashNone {
		return s
	}
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	size := max(s.HashBuckets(TargetCluster), s.HashBuckets(TargetLocal))
	most := maglev.MaxSize
	if b.Buckets != 0 {
		most = max(b.Buckets, maglev.SizeAtLeast(n))
	}
	if b.BucketsPerEndpoint != 0 && s.Spec.HashBuckets != 0 {
		most = min(most, max(maglev.SizeFor(n), maglev.SizeAtLeast(b.BucketsPerEndpoint*n)))
	}
	if size <= most {
		return s
	}
	best := 0
	for at := n; at <= most; at = best + 1 {
		next := maglev.SizeAtLeast(at)
		if next < at || next > most {
			break
		}
		best = next
	}
	if best == 0 {
		out.note("the hash: %d endpoints need more than %d buckets", n, most)
	} else {
		out.note("%d of %d buckets", size-best, size)
	}
	return withTable(s, best)
}

// withTable returns s with a table of the given size, 0 for no hash.
func withTable(s *Port, size int) *Port {
	if s.Hash() == tracker.HashNone {
		return s
	}
	c, p := *s, *s.Spec
	p.HashBuckets = uint16(size)
	if size == 0 {
		p.Hash = tracker.HashNone
	}
	c.Spec = &p
	return &c
}

// withFrontends returns s with its first n frontends.
func withFrontends(s *Port, n int) *Port {
	if n >= len(s.Frontends) {
		return s
	}
	c := *s
	c.Frontends = s.Frontends[:n:n]
	return &c
}

// withEndpoints returns s with the first n endpoints of each pool, at least 1.
func withEndpoints(s *Port, n int) *Port {
	cluster, local := s.Selection.Cluster, s.Selection.Local
	return withPools(s, cluster[:min(n, len(cluster))], local[:min(n, len(local))])
}

// withPools returns s with parts of its pools, which are in the order of the pools.
func withPools(s *Port, cluster, local []*tracker.Endpoint) *Port {
	if len(cluster) == len(s.Selection.Cluster) && len(local) == len(s.Selection.Local) {
		return s
	}
	c := *s
	c.Selection.Cluster, c.Selection.Local = slices.Clip(cluster), slices.Clip(local)
	switch {
	case len(local) == 0:
		c.Selection.Reachable = c.Selection.Cluster
	case len(cluster) == 0:
		c.Selection.Reachable = c.Selection.Local
	default:
		c.Selection.Reachable = nil
		for _, ep := range s.Selection.Reachable {
			in := false
			for _, pool := range []*[]*tracker.Endpoint{&cluster, &local} {
				if len(*pool) != 0 && (*pool)[0] == ep {
					*pool, in = (*pool)[1:], true
				}
			}
			if in {
				c.Selection.Reachable = append(c.Selection.Reachable, ep)
			}
		}
	}
	return &c
}

// grown returns a version of now that adds at most n endpoints to each pool of old, nil if it
// is new. It returns now itself if it adds no more.
func grown(old, now *Port, n int) *Port {
	part := func(t Target) []*tracker.Endpoint {
		pool := now.Pool(t)
		if len(pool) <= n {
			return pool
		}
		var had []*tracker.Endpoint
		if old != nil {
			had = old.Pool(t)
		}
		// Both pools are sorted by address.
		fresh := 0
		out := make([]*tracker.Endpoint, 0, min(len(pool), len(had)+n))
		for _, ep := range pool {
			for len(had) != 0 && had[0] != ep && had[0].Addr.Compare(ep.Addr) < 0 {
				had = had[1:]
			}
			if len(had) == 0 || had[0] != ep && had[0].Addr != ep.Addr {
				if fresh++; fresh > n {
					continue
				}
			}
			out = append(out, ep)
		}
		return out
	}
	return withPools(now, part(TargetCluster), part(TargetLocal))
}

// shrunk returns a version of a removed Service without frontends whose larger pool has n
// endpoints fewer, and the other pool no more than that. It returns nil if no pool has more than
// n, or if the choice is by a hash: its table is written and removed as a whole.
func shrunk(old *Port, n int) *Port {
	cluster, local := old.Pool(TargetCluster), old.Pool(TargetLocal)
	left := max(len(cluster), len(local)) - n
	if left <= 0 || old.Hash() != tracker.HashNone {
		return nil
	}
	out := *withEndpoints(old, left)
	out.Frontends = nil
	return &out
}

// changedElements returns about how many elements a change writes and deletes.
func (b *Budget) changedElements(c *Change) int {
	switch {
	case c.Fields == 0:
		return 0
	case c.Old == nil && c.New == nil:
		n := 0
		for _, s := range c.Attempted {
			n = max(n, b.cost(s))
		}
		return n
	case c.Old == nil:
		return b.cost(c.New)
	case c.New == nil:
		return b.cost(c.Old)
	case c.Fields&(FieldHash|FieldAffinity) != 0 || c.New.Hash() != tracker.HashNone ||
		c.New.Weighted(TargetCluster) || c.New.Weighted(TargetLocal) || b.Cost != nil:
		return b.cost(c.Old) + b.cost(c.New)
	}
	n := 1
	if c.Fields&FieldFrontends != 0 {
		n += frontendsCost(c.Old) + frontendsCost(c.New)
	}
	for _, t := range []Target{TargetCluster, TargetLocal} {
		n += differing(c.Old.Pool(t), c.New.Pool(t))
	}
	return n
}

// differing returns the number of endpoints that only one of two pools has. Both are sorted by
// address.
func differing(a, b []*tracker.Endpoint) (n int) {
	a, b = listdiff.Trim(a, b)
	for len(a) != 0 && len(b) != 0 {
		d := a[0].Addr.Compare(b[0].Addr)
		if d != 0 {
			n++
		}
		if d <= 0 {
			a = a[1:]
		}
		if d >= 0 {
			b = b[1:]
		}
	}
	return n + len(a) + len(b)
}

// cheapFirst moves the changes of expensive Services behind the others, so that a backend that
// writes a Full delta in several transactions serves the others first.
func (b *Budget) cheapFirst(changes []Change) {
	if b.Delta == 0 {
		return
	}
	expensive := func(c *Change) bool { return c.New != nil && b.cost(c.New) > b.Delta/4 }
	var last []Change
	n := 0
	for i := range changes {
		if expensive(&changes[i]) {
			last = append(last, changes[i])
		} else {
			changes[n] = changes[i]
			n++
		}
	}
	copy(changes[n:], last)
}

// LeftOut is what a [Budget] leaves out of a Service, always with the reason
// [tracker.ReasonLimitExceeded]. It must not be changed.
type LeftOut struct {
	// Text names the bounds and all parts that are left out, for people, such as "it has 30000
	// endpoints, at most 20000 are allowed; left out: 10000 of 30000 endpoints".
	Text string
	// Frontends holds the frontends that are left out.
	Frontends []Frontend
	// Sources is [tracker.ServicePort].SourceRangesLeftOut.
	Sources int
	// Endpoints is the number of endpoints that are missing from the larger pool.
	Endpoints int

	bounds, parts []string
}

func (l *LeftOut) clone() LeftOut {
	if l == nil {
		return LeftOut{}
	}
	out := *l
	out.Frontends, out.bounds, out.parts = slices.Clip(l.Frontends), slices.Clip(l.bounds), slices.Clip(l.parts)
	return out
}

// omissions collects what is left out of a Service.
type omissions struct{ LeftOut }

// bound adds a bound that the Service exceeds.
func (o *omissions) bound(format string, args ...any) {
	o.bounds = append(o.bounds, fmt.Sprintf(format, args...))
}

// note adds a part that is left out.
func (o *omissions) note(format string, args ...any) {
	o.parts = append(o.parts, fmt.Sprintf(format, args...))
}

// result returns what is left out, nil for nothing.
func (o *omissions) result() *LeftOut {
	if len(o.parts) == 0 {
		return nil
	}
	out := o.LeftOut
	out.Text = "left out: " + strings.Join(out.parts, ", ")
	if len(out.bounds) != 0 {
		out.Text = strings.Join(out.bounds, ", and ") + "; " + out.Text
	}
	return &out
}
