package model

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// fakeKernel holds tables in memory, by family. Like the kernel, it applies a transaction as a whole
// or refuses it and stays as it was.
type fakeKernel struct {
	tables map[tracker.Family]*fakeTable
	// local recognizes traffic of this node's pods, as rules do.
	local ruleset.LocalTraffic
	// elsewhere holds the addresses of other nodes' endpoints.
	elsewhere map[netip.Addr]bool
	// undo takes the running transaction back.
	undo []func()
}

// fakeTable is a table: its chains by name, with the objects that created them, and its sets.
type fakeTable struct {
	chains map[string]Object
	hooked bool
	// usesRanges reports whether packets meet the chains for ranges of ports.
	usesRanges bool
	// sources holds the prefix lengths that have a rule.
	sources map[int]bool
	sets    map[layout.Set]*fakeSet
}

type fakeSet struct {
	size     int
	elements map[layout.Octets]fakeElement
}

type fakeElement struct {
	data layout.Octets
	text string
}

// Refusals of the fake kernel.
var (
	errExists = errors.New("file exists")
	errAbsent = errors.New("no such file or directory")
	errFull   = errors.New("too many elements")
	errBusy   = errors.New("device or resource busy")
)

func newFakeKernel() *fakeKernel {
	return &fakeKernel{tables: map[tracker.Family]*fakeTable{}, elsewhere: map[netip.Addr]bool{}}
}

// commit applies a transaction.
func (k *fakeKernel) commit(tx *Tx) error {
	k.undo = k.undo[:0]
	if err := k.apply(tx); err != nil {
		for _, step := range slices.Backward(k.undo) {
			step()
		}
		return fmt.Errorf("transaction is refused: %w", err)
	}
	return nil
}

func (k *fakeKernel) apply(tx *Tx) error {
	for i := range tx.Objects {
		if err := k.object(&tx.Objects[i]); err != nil {
			return err
		}
	}
	for _, deletion := range []bool{true, false} {
		for i := range tx.Edits {
			if e := &tx.Edits[i]; e.Deletion == deletion {
				if err := k.edit(e); err != nil {
					return fmt.Errorf("%s %s %x: %w", e.Family, e.Set.Name(), e.Key.Bytes(), err)
				}
			}
		}
	}
	for f, t := range k.tables {
		for s, set := range t.sets {
			if set.size != 0 && len(set.elements) > set.size {
				return fmt.Errorf("%s %s: %w", f, s.Name(), errFull)
			}
		}
	}
	return nil
}

// put sets m[key], and remove deletes it. Both can be undone.
func put[K comparable, V any](k *fakeKernel, m map[K]V, key K, v V) {
	restore(k, m, key)
	m[key] = v
}

func remove[K comparable, V any](k *fakeKernel, m map[K]V, key K) {
	restore(k, m, key)
	delete(m, key)
}

func restore[K comparable, V any](k *fakeKernel, m map[K]V, key K) {
	old, ok := m[key]
	k.undo = append(k.undo, func() {
		if delete(m, key); ok {
			m[key] = old
		}
	})
}

func (k *fakeKernel) object(o *Object) error {
	t := k.tables[o.Family]
	switch o.Kind {
	case CreateTable:
		if t == nil {
			put(k, k.tables, o.Family, &fakeTable{chains: map[string]Object{}, sources: map[int]bool{}, sets: map[layout.Set]*fakeSet{}})
		}
		return nil
	case DeleteTable:
		remove(k, k.tables, o.Family)
		return nil
	}
	if t == nil {
		return fmt.Errorf("table %s: %w", o.Family, errAbsent)
	}
	add := func(name string) error {
		if _, ok := t.chains[name]; ok {
			return fmt.Errorf("chain %s: %w", name, errExists)
		}
		put(k, t.chains, name, *o)
		return nil
	}
	switch o.Kind {
	case NewSet:
		if t.sets[o.Set] != nil {
			return fmt.Errorf("set %s: %w", o.Set.Name(), errExists)
		}
		put(k, t.sets, o.Set, &fakeSet{o.Size, map[layout.Octets]fakeElement{}})
	case FixedChains:
		for _, name := range []string{layout.ChainServices, layout.ChainInternal, layout.ChainFirewallCheck, layout.ChainClusterIPs, layout.ChainMasquerading} {
			if err := add(name); err != nil {
				return err
			}
		}
	case BaseChains:
		was := t.hooked
		k.undo = append(k.undo, func() { t.hooked = was })
		t.hooked = true
	case HandlerChain:
		h := o.Handler
		for _, to := range []layout.Handler{h.Unguarded(), h.Direct()} {
			if _, ok := t.chains[to.Chain()]; !ok && to.Chain() != h.Chain() && (to.HasPool() || to.Handling != layout.HandleDirect) {
				return fmt.Errorf("chain %s goes to %s: %w", h.Chain(), to.Chain(), errAbsent)
			}
		}
		return add(h.Chain())
	case StickyChains:
		return add(layout.ChainStickySend)
	case RangeStickyChains:
		return add(layout.ChainRangeStickySend)
	case RangeChains:
		for s := layout.FirstOfRanges; s <= layout.LastOfRanges; s++ {
			if t.sets[s] == nil {
				return fmt.Errorf("set %s: %w", s.Name(), errAbsent)
			}
		}
		return add(layout.ChainRanges)
	case UseRanges, UnuseRanges:
		if _, ok := t.chains[layout.ChainRanges]; !ok {
			return fmt.Errorf("chain %s: %w", layout.ChainRanges, errAbsent)
		}
		was := t.usesRanges
		k.undo = append(k.undo, func() { t.usesRanges = was })
		t.usesRanges = o.Kind == UseRanges
	case ChooserChain:
		return add(o.Sticky.Chooser())
	case StickyChain:
		return add(o.Sticky.Chain())
	case SourceRule:
		put(k, t.sources, o.Size, true)
	case DeleteChain:
		for s, set := range t.sets {
			for _, e := range set.elements {
				if s.Verdicts() && e.text == o.Name {
					return fmt.Errorf("chain %s: %w", o.Name, errBusy)
				}
			}
		}
		remove(k, t.chains, o.Name)
	default:
		return fmt.Errorf("object of kind %d is not known", o.Kind)
	}
	return nil
}

func (k *fakeKernel) edit(e *Edit) error {
	t := k.tables[e.Family]
	if t == nil || t.sets[e.Set] == nil {
		return errAbsent
	}
	elements := t.sets[e.Set].elements
	_, exists := elements[e.Key]
	switch {
	case e.Deletion && !exists:
		return errAbsent
	case e.Deletion:
		remove(k, elements, e.Key)
	case exists:
		return errExists
	case e.Set.Concat() && t.overlaps(&e.Element):
		return errExists
	default:
		if _, ok := t.chains[e.Text]; e.Set.Verdicts() && !ok {
			return fmt.Errorf("chain %s: %w", e.Text, errAbsent)
		}
		put(k, elements, e.Key, fakeElement{e.Data, e.Text})
	}
	return nil
}

// fakeSink is a [Sink] that commits to a fake kernel.
type fakeSink struct {
	kernel *fakeKernel
	limit  int
	// written counts the elements, and sent the transactions.
	written, sent int
	// before, if not nil, is called before each commit, and after after it. If before returns an
	// error, the transaction is lost; if after does, its answer is.
	before, after func() error
}

func (s *fakeSink) Limit() int { return cmp.Or(s.limit, 256<<20) }

func (s *fakeSink) Send(tx *Tx) error {
	if s.before != nil {
		if err := s.before(); err != nil {
			return err
		}
	}
	creates := slices.ContainsFunc(tx.Objects, func(o Object) bool { return o.Kind == FixedChains })
	if tx.Size() > s.Limit() && !creates {
		return ErrTooLarge
	}
	s.written += len(tx.Edits)
	if len(tx.Objects)+len(tx.Edits) != 0 {
		s.sent++
		if err := s.kernel.commit(tx); err != nil {
			return err
		}
	}
	if s.after != nil {
		return s.after()
	}
	return nil
}

func (s *fakeSink) Commit(tx *Tx) error { return s.Send(tx) }

// elements returns the elements of a set, nil if it is missing.
func (t *fakeTable) elements(s layout.Set) map[layout.Octets]fakeElement {
	if t.sets[s] == nil {
		return nil
	}
	return t.sets[s].elements
}

// dump returns a line for each element that a packet or an operator sees. It resolves the numbers,
// which depend on the history.
func (k *fakeKernel) dump() string {
	var out []string
	for f, t := range k.tables {
		for _, s := range []layout.Set{layout.ServiceIPs, layout.NodePorts, layout.InternalIPs, layout.InternalNodePorts} {
			handlers := layout.Handlers
			if s == layout.InternalIPs || s == layout.InternalNodePorts {
				handlers = layout.InternalHandlers
			}
			for key, e := range t.elements(s) {
				out = append(out, fmt.Sprintf("%s %s %x: %s %s", f, s.Name(), key.Bytes(), e.text, t.resolve(handlers, number(e.data))))
			}
		}
		for _, s := range []layout.Set{layout.ClusterIPs, layout.NodePortIPs, layout.ServiceCIDRs} {
			for key, e := range t.elements(s) {
				out = append(out, fmt.Sprintf("%s %s %x %x", f, s.Name(), key.Bytes(), e.data.Bytes()))
			}
		}
		for s, set := range t.sets {
			if s >= layout.FirstAllowed || s == layout.RangeSources {
				for key, e := range set.elements {
					out = append(out, fmt.Sprintf("%s %s %x %x", f, s.Name(), key.Bytes(), e.data.Bytes()))
				}
			}
		}
		for key, e := range t.elements(layout.ServiceRanges) {
			_, data := (&layout.Element{Set: layout.ServiceRanges, Key: key, Data: e.data}).End()
			line := fmt.Sprintf("%s ranges %x-%x: %s", f, key.Bytes(), e.data.Bytes()[:4], e.text)
			any, _ := t.found(layout.RangeKeys, data)
			line += " " + t.resolve(layout.Handlers, number(any.data))
			if internal, ok := t.found(layout.InternalRangeKeys, data); ok {
				line += ", internal " + t.resolve(layout.InternalHandlers, number(internal.data))
			}
			out = append(out, line)
		}
		out = append(out, fmt.Sprintf("%s: ranges are used: %v, keys %d", f, t.usesRanges, len(t.elements(layout.RangeKeys))+len(t.elements(layout.InternalRangeKeys))))
		used := 0
		for _, s := range []layout.Set{layout.Endpoints, layout.StickyBuckets, layout.StickyEndpoints, layout.StickyPools} {
			used += len(t.elements(s))
		}
		out = append(out, fmt.Sprintf("%s: %d elements of pools", f, used))
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}
