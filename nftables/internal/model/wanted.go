package model

import (
	"time"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// wanted is what a version of a Service wants of its table: values that the departments compare. They add
// the numbers, which the table alone has. The zero value wants nothing.
type wanted struct {
	version  *ruleset.Port // nil if it is gone, or was not there
	key      tracker.Key
	affinity time.Duration
	// reachable holds the endpoints whose connections to themselves are masqueraded.
	reachable []*tracker.Endpoint
	pools     [ruleset.TargetLocal + 1]wantedPool // by target

	// The others are set by addFrontends. elements holds the elements of all frontends, without numbers.
	// keys holds the dispatch keys among them.
	elements []layout.Element
	keys     []wantedKey
}

// wantedPool is a pool that a Service wants. The zero value is a pool without endpoints.
type wantedPool struct {
	endpoints []*tracker.Endpoint
	// how is how the endpoints share the buckets, and size the number of buckets.
	how  distribution
	size int
	// handler only sends connections to the pool. sticky is its handler if it is sticky.
	handler layout.Handler
	sticky  layout.StickyHandler
	// used is set by addFrontends if a frontend leads to the pool.
	used bool
}

type wantedKey struct {
	element int
	// handler is the handler if the pool of target is not sticky.
	handler layout.Handler
	target  ruleset.Target
	// internal is set if the key is for internal traffic alone.
	internal bool
}

var targets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// setVersion makes w what a version of a Service wants, without its frontends, and returns w. s may be nil. w
// keeps its memory.
func (w *wanted) setVersion(s *ruleset.Port) *wanted {
	*w = wanted{elements: w.elements[:0], keys: w.keys[:0]}
	if s != nil {
		s = Limits().Hold(s)
		w.version, w.key, w.affinity, w.reachable = s, s.Key, s.Spec.Affinity, s.Selection.Reachable
		for _, target := range targets {
			w.pools[target] = wantPool(s, target)
		}
	}
	return w
}

func wantPool(s *ruleset.Port, target ruleset.Target) wantedPool {
	hash := s.Hash()
	p := wantedPool{endpoints: s.Pool(target), size: s.HashBuckets(target)}
	p.how.size = p.size
	if p.size == 0 {
		if p.size = len(p.endpoints); s.Weighted(target) {
			p.how.weighted, p.size = true, ruleset.TotalShares(p.endpoints)
		}
	}
	p.handler, p.sticky = layout.PoolHandlers(p.size, hash, s.Spec.Affinity)
	return p
}

func (w *wanted) hashed(target ruleset.Target, seed uint64) *maglev.Table {
	return w.version.Maglev(target, seed)
}

// keepsFrontends reports whether the elements of the frontends stay as they are if the given fields of a
// Service change, which wanted before.
func (w *wanted) keepsFrontends(before *wanted, fields ruleset.Field) bool {
	same := before.version != nil && fields&(ruleset.FieldFrontends|ruleset.FieldAffinity|ruleset.FieldHash) == 0
	for _, target := range targets {
		same = same && (w.affinity != 0 || w.pools[target].handler == before.pools[target].handler)
	}
	return same
}

// maxNumberedEndpoints is the largest number of endpoints of a pool in which an endpoint may
// have several buckets. Half of the numbers are left for endpoints that replace others.
const maxNumberedEndpoints = 1<<15 - 1

// addFrontends adds what the frontends want. protocol is the number of the Service's protocol.
func (w *wanted) addFrontends(protocol uint8) {
	for i := 0; w.version != nil && i < len(w.version.Frontends); i++ {
		f := &w.version.Frontends[i]
		set, internal, key := layout.FrontendKey(f.Kind == ruleset.KindNodePort, f.Addr, protocol, f.Port)
		w.addKeys(f, layout.Element{Set: set, Named: true, Key: key}, internal)
		for _, source := range f.Sources {
			key := layout.SourceKey(source.Masked().Addr(), f.Addr, protocol, f.Port)
			w.elements = append(w.elements, layout.Element{Set: layout.Allowed(source.Bits()), Named: true, Key: key})
		}
		if f.Kind == ruleset.KindClusterIP {
			w.elements = append(w.elements, layout.Element{Set: layout.ClusterIPs, Key: ip(f.Addr)})
		}
	}
}

// addKeys adds an element with the dispatch key of a frontend. If internal traffic has a handler of its
// own, addKeys adds the element of the set internal, too.
func (w *wanted) addKeys(f *ruleset.Frontend, e layout.Element, internal layout.Set) {
	h, own := w.handlers(f)
	w.addKey(e, wantedKey{handler: h, target: f.Target})
	if own.HasPool() {
		e.Set = internal
		w.addKey(e, wantedKey{handler: own, target: ruleset.TargetCluster, internal: true})
	}
}

func (w *wanted) addKey(e layout.Element, k wantedKey) {
	if k.target > ruleset.TargetLocal {
		k.target = 0 // no pool
	}
	w.pools[k.target].used = true
	k.element = len(w.elements)
	w.elements, w.keys = append(w.elements, e), append(w.keys, k)
}

// handlers returns the handlers of a frontend if its pools are not sticky. own is the handler of internal
// traffic if it has one of its own, and the zero Handler otherwise.
func (w *wanted) handlers(f *ruleset.Frontend) (h, own layout.Handler) {
	if f.Target == ruleset.TargetCluster || f.Target == ruleset.TargetLocal {
		h = w.pools[f.Target].handler
	}
	h.Firewall = len(f.Sources) != 0
	switch {
	case f.Target == ruleset.TargetReject:
		h.Handling = layout.HandleReject
	case f.Target == ruleset.TargetDrop && f.Internal == ruleset.TargetCluster:
		h.Handling = layout.HandleInternalOrDrop
	case f.Target == ruleset.TargetDrop:
		h.Handling = layout.HandleDrop
	case f.Masquerade == ruleset.MasqueradeAlways:
		h.Handling = layout.HandleAlways
	case f.Masquerade == ruleset.MasqueradeNotPods:
		h.Handling = layout.HandleNotPods
	case f.Masquerade == ruleset.MasqueradeNode:
		h.Handling = layout.HandleInternal
	}
	if f.ShortCircuit() && f.Internal == ruleset.TargetCluster {
		own = w.pools[ruleset.TargetCluster].handler
	}
	return h, own
}

// HandlersOf returns the handlers of a frontend of a Service that has all pools that it asks for: h, and own
// if internal traffic has a handler of its own.
func HandlersOf(s *ruleset.Port, f *ruleset.Frontend) (h, own layout.Handler) {
	var w wanted
	h, own = w.setVersion(s).handlers(f)
	if w.affinity != 0 {
		h, own = h.ToSticky(), own.ToSticky()
	}
	return h, own
}

// StickyHandlerOf returns the handler of the Service's sticky pool for a target.
func StickyHandlerOf(s *ruleset.Port, target ruleset.Target) layout.StickyHandler {
	var w wanted
	return w.setVersion(s).pools[target].sticky
}
