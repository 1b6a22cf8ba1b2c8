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
// take time and memory from those of others. Costs are numbers of elements: see
// [Service.Cost]. In all fields zero means no bound; [DefaultBudget] suits a node.
//
// A Service port that exceeds a bound is served as far as the bound allows. The Engine first
// gives up its hash or its weights, so that endpoints are chosen at random, then leaves out
// the last frontends if they need more than a fifth of the bound, and then the last endpoints.
// Which parts are left out depends only on the object and the Budget, so all nodes agree, and
// endpoints that are gone leave the rules. The Engine logs the excess to [Config].Log and
// sends an event with [tracker.ReasonLimitExceeded].
type Budget struct {
	// Port is the maximum cost of one port of a Service in one family.
	Port int
	// Service is the maximum cost of all ports of a Service in both families. Each may cost
	// an equal share, but not more than Port.
	Service int
	// Namespace is the maximum cost of all Services of one namespace, so that the users of a
	// namespace cannot use up Total alone. A port that has rules may always cost what it
	// does, and have at least one endpoint. Beyond that, a port gets what is left. When
	// others cost less, the ports without rules come first, then those that are incomplete,
	// each in the order of the age of their Services and then of their keys. After a restart
	// no port has rules, so the order of arrival decides nothing.
	Namespace int
	// Total is the maximum cost of all Services. It is divided as Namespace is. A bound that
	// is several times Namespace leaves room for other namespaces.
	Total int
	// Buckets is the maximum number of buckets of a hash table. A larger table gets the
	// largest size in the Budget. A pool with more endpoints than that has no hash.
	Buckets int
	// BucketsPerEndpoint is the maximum number of buckets for each endpoint of a table
	// whose size [tracker.ServicePort].HashBuckets determines.
	BucketsPerEndpoint int
	// Delta is about the most elements that one delta changes, unless it is Full or a 32nd of
	// all that waits is more. Syncs divide larger changes into several deltas: see
	// [Cursor.Sync]. For a backend with a smaller [Limits].Delta, that counts.
	Delta int
	// Cost, if not nil, replaces [Service.Cost], for data planes that need more elements.
	// Leaving out endpoints, frontends, weights or the hash must not raise the cost.
	Cost func(*Service) int
}

// DefaultBudget returns a Budget for a node: 6,000 elements for a port in a family, 500,000
// for a Service, 1,250,000 for a namespace, 5,000,000 in all, tables of at most 4,093 buckets and
// 256 for each endpoint, and deltas of 1,000 elements.
func DefaultBudget() Budget {
	return Budget{Port: 6_000, Service: 500_000, Namespace: 1_250_000, Total: 5_000_000, Buckets: 4093, BucketsPerEndpoint: 256, Delta: 1_000}
}

func (b *Budget) validate() error {
	for _, n := range []int{b.Port, b.Service, b.Namespace, b.Total, b.Buckets, b.BucketsPerEndpoint, b.Delta} {
		if n < 0 {
			return fmt.Errorf("%d is negative", n)
		}
	}
	return nil
}

func (b *Budget) cost(s *Service) int {
	if b.Cost != nil {
		return b.Cost(s)
	}
	return s.Cost()
}

// Cost returns the number of elements that a data plane typically needs for s: one for each
// frontend, one for each of its sources, one for each endpoint or bucket of a pool, and one
// more for each endpoint with client affinity.
func (s *Service) Cost() int {
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
		if s.Port.Affinity != 0 {
			n += len(pool)
		}
	}
	return n
}

// frontendsCost returns the part of [Service.Cost] for the frontends.
func frontendsCost(s *Service) (n int) {
	for i := range s.Frontends {
		n += 1 + len(s.Frontends[i].Sources)
	}
	return n
}

// fit returns s if it costs at most the given number of elements and its tables are within
// the Budget. Otherwise it returns a version of s that does, and what it leaves out. It
// returns nil if even one frontend with one endpoint costs more. most 0 means no bound.
func (b *Budget) fit(s *Service, most int) (*Service, string) {
	var left []string
	note := func(format string, args ...any) { left = append(left, fmt.Sprintf(format, args...)) }
	s = b.limitTable(s, note)
	over := func(s *Service) bool { return most != 0 && b.cost(s) > most }
	if !over(s) {
		return s, strings.Join(left, "; ")
	}
	cost := b.cost(s)
	if s.Hash() != tracker.HashNone {
		s = withTable(s, 0)
		note("the hash")
	}
	if over(s) && !s.uniform && (s.Weighted(TargetCluster) || s.Weighted(TargetLocal)) {
		c := *s
		c.uniform = true
		s = &c
		note("the weights")
	}
	if over(s) {
		all := s
		n := len(all.Frontends)
		if n > 1 {
			m := sort.Search(n, func(m int) bool {
				return b.cost(withEndpoints(withFrontends(all, m+1), 1)) > most/5
			})
			s = withFrontends(all, max(m, 1))
		}
		if out := n - len(s.Frontends); out > 0 {
			note("%d of %d frontends", out, n)
		}
		n = max(len(s.Selection.Cluster), len(s.Selection.Local))
		if over(s) && n > 1 {
			all := s
			k := sort.Search(n, func(k int) bool { return over(withEndpoints(all, k+1)) })
			s = withEndpoints(all, max(k, 1))
			note("%d of %d endpoints", n-max(k, 1), n)
		}
		if over(s) {
			return nil, fmt.Sprintf("it costs %d elements, at most %d are left", cost, most)
		}
	}
	return s, fmt.Sprintf("it costs %d elements, at most %d are allowed; left out: %s", cost, most, strings.Join(left, ", "))
}

// limitTable returns s with a hash table within the Budget.
func (b *Budget) limitTable(s *Service, note func(string, ...any)) *Service {
	if s.Hash() == tracker.HashNone {
		return s
	}
	n := max(len(s.Selection.Cluster), len(s.Selection.Local))
	size := max(s.HashBuckets(TargetCluster), s.HashBuckets(TargetLocal))
	most := maglev.MaxSize
	if b.Buckets != 0 {
		most = b.Buckets
	}
	if b.BucketsPerEndpoint != 0 && s.Port.HashBuckets != 0 {
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
		note("the hash: %d endpoints need more than %d buckets", n, most)
	} else {
		note("%d of %d buckets", size-best, size)
	}
	return withTable(s, best)
}

// withTable returns s with a table of the given size, 0 for no hash.
func withTable(s *Service, size int) *Service {
	if s.Hash() == tracker.HashNone {
		return s
	}
	c, p := *s, *s.Port
	p.HashBuckets = uint16(size)
	if size == 0 {
		p.Hash = tracker.HashNone
	}
	c.Port = &p
	return &c
}

// withFrontends returns s with its first n frontends.
func withFrontends(s *Service, n int) *Service {
	if n >= len(s.Frontends) {
		return s
	}
	c := *s
	c.Frontends = s.Frontends[:n:n]
	return &c
}

// withEndpoints returns s with the first n endpoints of each pool, at least 1.
func withEndpoints(s *Service, n int) *Service {
	cluster, local := s.Selection.Cluster, s.Selection.Local
	return withPools(s, cluster[:min(n, len(cluster))], local[:min(n, len(local))])
}

// withPools returns s with parts of its pools, which are in the order of the pools.
func withPools(s *Service, cluster, local []*tracker.Endpoint) *Service {
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
func grown(old, now *Service, n int) *Service {
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
func shrunk(old *Service, n int) *Service {
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
