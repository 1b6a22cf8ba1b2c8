package ruleset

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/tracker"
)

// Budget bounds what Services may cost a data plane, so that the objects of one user do not take time and memory from
// those of others. Port counts endpoints, and the other fields elements: see [Port.Cost]. Zero means no bound;
// [DefaultBudget] suits a node.
//
// What is left out depends only on the objects, the node and the Budget, not on their history: see [LeftOut]. The
// Engine logs the excess to [Config].Log and sends an event with [tracker.ReasonLimitExceeded].
type Budget struct {
	// Port is the maximum number of endpoints of one port of a Service in one family. The last
	// ones are left out.
	Port int
	// Namespace is the maximum cost of all Services of one namespace. If its Service ports cost more, each one that
	// fits into what is left gets all its elements, in the order of the age of their Services and then of their keys.
	// The others have no rules.
	Namespace int
	// Total is the maximum cost of all Services. If they cost more, the namespaces that cost most get an equal number
	// of elements each, as if that were Namespace. A namespace that costs less than an equal part of Total always
	// gets all it needs.
	Total int
	// Delta is about the most elements that one delta changes, unless it is Full or a 32nd of all that waits is more.
	// Syncs divide larger changes into several deltas: see [Cursor.Sync]. A smaller [Limits].Delta of a backend
	// counts instead.
	Delta int
}

// DefaultBudget returns a Budget for a node: 20,000 endpoints for a port in a family, 1,250,000
// elements for a namespace, 5,000,000 in all, and deltas of 1,000 elements.
func DefaultBudget() Budget {
	return Budget{Port: 20_000, Namespace: 1_250_000, Total: 5_000_000, Delta: 1_000}
}

func (b *Budget) validate() error {
	for _, n := range []int{b.Port, b.Namespace, b.Total, b.Delta} {
		if n < 0 {
			return fmt.Errorf("%d is negative", n)
		}
	}
	return nil
}

// Cost returns the number of elements that s may need in a data plane: one for each frontend and each of its sources,
// for each endpoint of each frontend, and for each bucket of a hash table or share of a weight, and one more for each
// endpoint of a pool with client affinity.
func (s *Port) Cost() int {
	n := 0
	for i := range s.Frontends {
		f := &s.Frontends[i]
		n += 1 + len(f.Sources) + max(len(s.Pool(f.Target)), len(s.Pool(f.Internal)))
	}
	for _, t := range poolTargets {
		if n += s.HashBuckets(t); s.Hash() == tracker.HashNone && s.Weighted(t) {
			n += TotalShares(s.Pool(t))
		}
		if s.Spec.Affinity != 0 {
			n += len(s.Pool(t))
		}
	}
	return n
}

var poolTargets = [...]Target{TargetCluster, TargetLocal}

// maxPools is the maximum number of pools. Package nftables numbers twice as many in a family: a
// change may add pools before it removes others.
const maxPools = 1<<19 - 1

// cost returns what s takes of b.Namespace and b.Total.
func (b *Budget) cost(s *Port) int {
	pools := 0
	for _, t := range poolTargets {
		if len(s.Pool(t)) != 0 {
			pools++
		}
	}
	return max(s.Cost(), pools*((b.Total+maxPools-1)/maxPools))
}

// limit returns s within the bounds on one Service port, with what they leave out.
func (b *Budget) limit(s *Port) *Port {
	var bounds, parts []string
	var out LeftOut
	if out.Sources = s.Spec.SourceRangesLeftOut; out.Sources != 0 {
		bounds, parts = append(bounds, "it has too many source ranges"), append(parts, fmt.Sprintf("%d source ranges", out.Sources))
	}
	if all := len(s.Selection.Reachable); b.Port != 0 && all > b.Port {
		n := max(len(s.Selection.Cluster), len(s.Selection.Local))
		keep := max(1, sort.Search(n, func(k int) bool { return len(withEndpoints(s, k+1).Selection.Reachable) > b.Port }))
		s, out.Endpoints = withEndpoints(s, keep), n-keep
		bounds = append(bounds, fmt.Sprintf("it has %d endpoints, at most %d are allowed", all, b.Port))
		parts = append(parts, fmt.Sprintf("%d of %d endpoints", n-keep, n))
	}
	if len(parts) != 0 {
		out.Text = strings.Join(bounds, ", and ") + "; left out: " + strings.Join(parts, ", ")
		c := *s
		s, c.LeftOut = &c, &out
	}
	return s
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

// shrunk returns a version of a removed Service without frontends whose pools have n endpoints fewer than the larger
// one. It returns nil if no pool has more than n, or if the choice is by a hash: its table is removed as a whole.
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
func changedElements(c *Change) int {
	switch {
	case c.Fields == 0:
		return 0
	case c.Old == nil && c.New == nil:
		return 1
	case c.Old == nil:
		return c.New.Cost()
	case c.New == nil:
		return c.Old.Cost()
	case c.Fields&(FieldHash|FieldAffinity) != 0 || c.New.Hash() != tracker.HashNone ||
		c.New.Weighted(TargetCluster) || c.New.Weighted(TargetLocal):
		return c.Old.Cost() + c.New.Cost()
	}
	n := 1
	var users [TargetLocal + 1]int // the frontends that lead to each pool
	had := newFinder(c.Old.Frontends, func(f Frontend) l4Key { return l4KeyOf(c.Old, &f) })
	for i := range c.New.Frontends {
		f := &c.New.Frontends[i]
		for _, t := range poolTargets {
			if f.Target == t || f.Internal == t {
				users[t]++
			}
		}
		if c.Fields&FieldFrontends != 0 {
			if n += 1 + len(f.Sources); !had.has(l4KeyOf(c.New, f)) {
				n += max(len(c.New.Pool(f.Target)), len(c.New.Pool(f.Internal)))
			}
		}
	}
	for i := range c.Old.Frontends {
		if c.Fields&FieldFrontends != 0 {
			n += 1 + len(c.Old.Frontends[i].Sources)
		}
	}
	for _, t := range poolTargets {
		n += max(1, users[t]) * differing(c.Old.Pool(t), c.New.Pool(t))
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

// cheapFirst moves the changes of expensive Services behind the others, so that a Full delta in several transactions
// serves the others first.
func (b *Budget) cheapFirst(changes []Change) {
	if b.Delta == 0 {
		return
	}
	expensive := func(c *Change) bool { return c.New != nil && c.New.Cost() > b.Delta/4 }
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

// LeftOut is what a [Budget], or [Limits], leaves out of a Service, always with the reason
// [tracker.ReasonLimitExceeded]. It must not be changed.
type LeftOut struct {
	// Text names the bounds and all parts that are left out, such as "it has 30000 endpoints, at most 20000 are
	// allowed; left out: 10000 of 30000 endpoints".
	Text string
	// Sources is [tracker.ServicePort].SourceRangesLeftOut.
	Sources int
	// Endpoints is the number of endpoints that are missing from the larger pool.
	Endpoints int
}
