package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// memory is nf_tables of one network namespace in memory. Like Linux, it applies a transaction as a
// whole or refuses it and stays as it was. It stores what Linux would, except for the expressions of
// rules, and returns the errors that Linux would. It does not know which sets a rule looks up.
type memory struct {
	// fail, unless it is nil, is called before each commit. If it returns an error, the commit
	// fails with it. Every second failed commit takes effect, as if its answer was lost.
	fail func() error
	// look, unless it is nil, is called after each commit.
	look func()
	// limit, if not 0, is the largest transaction in bytes.
	limit int
	// links holds the network interfaces.
	links map[string]int

	mu       sync.Mutex
	failures int
	// interrupted is the number of reads that fail because of a concurrent transaction.
	interrupted int
	// refusals holds the transactions that were refused.
	refusals []error
	// written counts the elements that were added or deleted.
	written    int
	tables     map[tableID]*memoryTable
	generation uint32
	handles    uint64
	// undo takes the running transaction back.
	undo []func()
	// rules, unless it is nil, interprets the transactions for packets.
	rules *fake.Tables
}

type tableID struct {
	name   string
	family tracker.Family
}

// memoryTable is a table. Its objects are stored by name.
type memoryTable struct {
	nft.Head
	family     tracker.Family
	sets       map[string]*memorySet
	chains     map[string]*memoryChain
	flowtables map[string]map[string]bool
}

type memorySet struct {
	nft.Set
	of       layout.Set
	elements map[string]nft.Element
}

type memoryChain struct {
	name   string
	base   *nft.BaseChain
	handle uint64
	sticky layout.StickyHandler
	rules  []memoryRule
}

// memoryRule is a rule, which may lead to other chains.
type memoryRule struct {
	handle, sum uint64
	to          []string
}

func newMemory() *memory { return &memory{tables: map[tableID]*memoryTable{}} }

// connect returns a connection for one Backend.
func (m *memory) connect() *memoryConn { return &memoryConn{memory: m} }

// put sets of[key], and remove deletes it. Both can be undone.
func put[K comparable, V any](m *memory, of map[K]V, key K, v V) {
	restore(m, of, key)
	of[key] = v
}

func remove[K comparable, V any](m *memory, of map[K]V, key K) {
	restore(m, of, key)
	delete(of, key)
}

func restore[K comparable, V any](m *memory, of map[K]V, key K) {
	old, ok := of[key]
	m.undo = append(m.undo, func() {
		if delete(of, key); ok {
			of[key] = old
		}
	})
}

// handle returns a new handle.
func (m *memory) handle() uint64 {
	m.handles++
	return m.handles
}

// commit applies a transaction.
func (m *memory) commit(steps []step) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.undo = m.undo[:0]
	for _, s := range steps {
		if errno := s.do(m); errno != 0 {
			for _, back := range slices.Backward(m.undo) {
				back()
			}
			err := &Error{Errno: errno, What: s.what}
			m.refusals = append(m.refusals, err)
			return err
		}
	}
	if len(m.undo) != 0 {
		m.generation++
	}
	return nil
}

// alter is a change by another process.
func (m *memory) alter(f tracker.Family, change func(*memoryTable)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.generation++
	change(m.inUse(f))
}

// object creates or deletes an object of a table.
func (m *memory) object(id tableID, r kernel.Rules, o *model.Object) syscall.Errno {
	t := m.tables[id]
	switch o.Kind {
	case model.CreateTable, model.CreateNewTable:
		if t == nil {
			t = &memoryTable{
				Head: nft.Head{Exists: true, Handle: m.handle()}, family: id.family,
				sets: map[string]*memorySet{}, chains: map[string]*memoryChain{}, flowtables: map[string]map[string]bool{},
			}
			put(m, m.tables, id, t)
		} else if o.Kind == model.CreateNewTable {
			return syscall.EEXIST
		}
		return 0
	case model.DeleteTable:
		if t == nil {
			return syscall.ENOENT
		}
		remove(m, m.tables, id)
		return 0
	}
	if t == nil {
		return syscall.ENOENT
	}
	switch o.Kind {
	case model.NewSet:
		return m.newSet(t, o.Set, o.Size)
	case model.DeleteSet:
		if t.sets[o.Name] == nil {
			return syscall.ENOENT
		}
		remove(m, t.sets, o.Name)
	case model.DeleteRules:
		for name := range t.chains {
			m.setRules(t, name, nil)
		}
	case model.DeleteChain:
		if t.chains[o.Name] == nil {
			return syscall.ENOENT
		}
		if t.leadsTo(o.Name) {
			return syscall.EBUSY
		}
		remove(m, t.chains, o.Name)
	case model.NewFlowtable:
		put(m, t.flowtables, layout.FastPath, map[string]bool{})
	case model.DeleteFlowtable:
		if t.flowtables[o.Name] == nil {
			return syscall.ENOENT
		}
		remove(m, t.flowtables, o.Name)
	case model.AddDevices, model.DeleteDevices:
		return m.devices(t, o)
	case model.SourceRule:
		c := t.chains[layout.ChainFirewallCheck]
		if c == nil || t.sets[layout.Allowed(o.Size).Name()] == nil {
			return syscall.ENOENT
		}
		m.setRules(t, c.name, append([]memoryRule{{handle: m.handle()}}, c.rules...))
	default:
		return m.newChains(t, r, o)
	}
	return 0
}

// newSet creates a set, unless the table has the same.
func (m *memory) newSet(t *memoryTable, s layout.Set, size int) syscall.Errno {
	set := &memorySet{nft.Set{Spec: s.Spec(t.family), Size: size, Count: -1}, s, map[string]nft.Element{}}
	if old := t.sets[s.Name()]; old == nil {
		put(m, t.sets, s.Name(), set)
	} else if !old.Is(set.Spec) {
		return syscall.EEXIST
	}
	return 0
}

// newChains creates chains unless they exist, and appends their rules.
func (m *memory) newChains(t *memoryTable, r kernel.Rules, o *model.Object) syscall.Errno {
	for _, c := range chainsOf(r, o) {
		old := t.chains[c.name]
		if old == nil {
			old = &memoryChain{name: c.name, base: c.base, handle: m.handle(), sticky: o.Sticky}
			put(m, t.chains, c.name, old)
		} else if c.base != nil && old.base == nil {
			return syscall.EEXIST
		}
		rules := slices.Clone(old.rules)
		for _, r := range c.rules {
			for _, to := range r.to {
				if t.chains[to] == nil {
					return syscall.ENOENT
				}
			}
			r.handle = m.handle()
			rules = append(rules, r)
		}
		m.setRules(t, c.name, rules)
	}
	return 0
}

// setRules gives a chain other rules.
func (m *memory) setRules(t *memoryTable, chain string, rules []memoryRule) {
	c := *t.chains[chain]
	c.rules = rules
	put(m, t.chains, chain, &c)
}

// leadsTo reports whether an element or a rule of another chain leads to a chain.
func (t *memoryTable) leadsTo(chain string) bool {
	for _, set := range t.sets {
		for _, e := range set.elements {
			if e.Chain == chain {
				return true
			}
		}
	}
	for name, c := range t.chains {
		for _, r := range c.rules {
			if name != chain && slices.Contains(r.to, chain) {
				return true
			}
		}
	}
	return false
}

// devices adds interfaces to the flowtable, or deletes them.
func (m *memory) devices(t *memoryTable, o *model.Object) syscall.Errno {
	if t.flowtables[layout.FastPath] == nil {
		return syscall.ENOENT
	}
	devices := maps.Clone(t.flowtables[layout.FastPath])
	for _, name := range o.Names {
		_, exists := m.links[name]
		switch {
		case o.Kind == model.AddDevices && !exists, o.Kind == model.DeleteDevices && !devices[name]:
			return syscall.ENOENT
		case o.Kind == model.AddDevices && devices[name]:
			return syscall.EEXIST
		case o.Kind == model.AddDevices:
			devices[name] = true
		default:
			delete(devices, name)
		}
	}
	put(m, t.flowtables, layout.FastPath, devices)
	return 0
}

// chainsOf returns the chains that an object creates.
func chainsOf(r kernel.Rules, o *model.Object) (out []memoryChain) {
	for _, c := range r.Chains(o) {
		m := memoryChain{name: c.Name, base: c.Base}
		for _, text := range c.Rules {
			var to []string
			for words := nft.Words(text); words != ""; {
				if word := words.Next(); word == "jump" || word == "goto" {
					to = append(to, words.Next())
				}
			}
			m.rules = append(m.rules, memoryRule{to: to})
		}
		out = append(out, m)
	}
	return out
}

// elementKey identifies an element in its set.
func elementKey(e nft.Element) string {
	if e.IntervalEnd {
		return "end of " + string(e.Key)
	}
	return string(e.Key)
}

// element adds an element to a set or deletes it.
func (m *memory) element(id tableID, s layout.Set, e nft.Element, deletion, exclusive bool) syscall.Errno {
	t := m.tables[id]
	if t == nil || t.sets[s.Name()] == nil {
		return syscall.ENOENT
	}
	m.written++
	set, key := t.sets[s.Name()], elementKey(e)
	old, exists := set.elements[key]
	switch {
	case deletion && !exists:
		return syscall.ENOENT
	case deletion:
		remove(m, set.elements, key)
	case e.Chain != "" && t.chains[e.Chain] == nil:
		return syscall.ENOENT
	case exists && (exclusive || string(old.Data) != string(e.Data) || old.Chain != e.Chain):
		return syscall.EEXIST
	case exists:
	case set.Size != 0 && len(set.elements) >= set.Size:
		return syscall.ENFILE
	default:
		put(m, set.elements, key, e)
	}
	return 0
}

// step is a message of a transaction.
type step struct {
	what string
	do   func(*memory) syscall.Errno
}

// memoryWriter is a [writer].
type memoryWriter struct {
	kernel.Lists
	table    string
	rules    map[tracker.Family]kernel.Rules
	steps    []step
	finished bool
	// text is what Add got, as nft reads it.
	text strings.Builder
	// objects is for the size of the objects, and bytes is that of elements.
	objects model.Tx
	bytes   int
}

func (w *memoryWriter) Use(table string) { w.table = table }
func (w *memoryWriter) Empty() bool      { return len(w.steps) == 0 && w.bytes == 0 && w.Lists.Empty() }

func (w *memoryWriter) Reset() {
	w.Lists.Reset()
	w.steps, w.finished, w.bytes = nil, false, 0
	w.objects.Reset()
	w.text.Reset()
}

func (w *memoryWriter) Add(tx *model.Tx) {
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		part := &model.Tx{
			Objects: slices.DeleteFunc(slices.Clone(tx.Objects), func(o model.Object) bool { return o.Family != f }),
			Edits:   slices.DeleteFunc(slices.Clone(tx.Edits), func(e model.Edit) bool { return e.Family != f }),
		}
		rules := w.rules[f]
		rules.Family = f
		text := kernel.NewText(w.table, rules)
		text.Add(part)
		w.text.WriteString(text.String())
	}
	for _, o := range tx.Objects {
		w.objects.Object(o)
		id, r := tableID{w.table, o.Family}, w.rules[o.Family]
		w.steps = append(w.steps, step{fmt.Sprintf("object of kind %d %s", o.Kind, o.Name), func(m *memory) syscall.Errno { return m.object(id, r, &o) }})
	}
	for i := range tx.Edits {
		w.Edit(&tx.Edits[i])
	}
}

func (w *memoryWriter) elements(f tracker.Family, s layout.Set, list *nft.Elements, deletion, exclusive bool) {
	what := map[bool]string{false: "add elements to ", true: "delete elements of "}[deletion] + s.Name()
	id := tableID{w.table, f}
	list.Each(func(e nft.Element) {
		for _, b := range []*[]byte{&e.Key, &e.Data, &e.Expr, &e.Timeout, &e.Expiration} {
			*b = slices.Clone(*b)
		}
		w.steps = append(w.steps, step{what, func(m *memory) syscall.Errno { return m.element(id, s, e, deletion, exclusive) }})
	})
	w.bytes += list.Size()
}

func (w *memoryWriter) AddElements(f tracker.Family, s layout.Set, list *nft.Elements) {
	w.elements(f, s, list, false, false)
}

func (w *memoryWriter) DeleteElements(f tracker.Family, s layout.Set, list *nft.Elements) {
	w.elements(f, s, list, true, false)
}

func (w *memoryWriter) Finish() error {
	w.Each(func(f tracker.Family, s layout.Set, deletion bool, list *nft.Elements) {
		w.elements(f, s, list, deletion, true)
	})
	w.finished = true
	return nil
}

// memoryConn is one Backend's [connection].
type memoryConn struct {
	*memory
	commits uint32
	closed  bool
}

var _ connection = &memoryConn{}

func (c *memoryConn) NewWriter(table string, rules ...kernel.Rules) writer {
	w := &memoryWriter{table: table, rules: map[tracker.Family]kernel.Rules{}}
	for _, r := range rules {
		w.rules[r.Family] = r
	}
	return w
}

func (c *memoryConn) Commit(of writer) error {
	w := of.(*memoryWriter)
	if !w.finished {
		if err := w.Finish(); err != nil {
			return err
		}
	}
	// Size is an upper bound, about twice the encoding of most objects.
	if size := w.objects.Size()/2 + w.bytes; size > c.Limit() {
		return fmt.Errorf("%w: %d bytes, at most %d", model.ErrTooLarge, size, c.Limit())
	}
	if c.closed {
		return errClosed
	}
	if len(w.steps) == 0 {
		return nil
	}
	var lost error
	if c.fail != nil {
		if lost = c.fail(); lost != nil {
			if c.failures++; c.failures%2 == 0 {
				return lost
			}
		}
	}
	if err := c.memory.commit(w.steps); err != nil {
		return errors.Join(lost, err)
	}
	if c.rules != nil {
		if err := c.rules.Load(w.text.String()); err != nil {
			return fmt.Errorf("the transaction is in effect, but %w", err)
		}
	}
	if c.look != nil {
		c.look()
	}
	if lost == nil {
		c.commits++
	}
	return lost
}

func (c *memoryConn) Limit() int      { return cmp.Or(c.limit, 256<<20) }
func (c *memoryConn) Commits() uint32 { return c.commits }
func (c *memoryConn) Closed() bool    { return c.closed }
func (c *memoryConn) WaitForPackets() {}

func (c *memoryConn) Close() error {
	c.closed = true
	return nil
}

// read calls fn with a table, nil if it is missing.
func (c *memoryConn) read(name string, f tracker.Family, fn func(*memoryTable)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed
	}
	fn(c.tables[tableID{name, f}])
	return nil
}

// dump is like read, and repeats it if transactions of other processes interrupt it.
func (c *memoryConn) dump(name string, f tracker.Family, fn func(*memoryTable)) error {
	return nfnl.Again(context.Background(), func() error { return c.dumpOnce(name, f, fn) })
}

func (c *memoryConn) dumpOnce(name string, f tracker.Family, fn func(*memoryTable)) error {
	interrupted := false
	err := c.read(name, f, func(t *memoryTable) {
		if interrupted = c.interrupted > 0; interrupted {
			c.interrupted--
		}
		fn(t)
	})
	if err == nil && interrupted {
		err = fmt.Errorf("memory: %w", nfnl.ErrInterrupted)
	}
	return err
}

func (c *memoryConn) Generation() (gen uint32, err error) {
	err = c.read("", 0, func(*memoryTable) { gen = c.generation })
	return gen, err
}

func (c *memoryConn) Table(name string, f tracker.Family) (head nft.Head, err error) {
	err = c.read(name, f, func(t *memoryTable) {
		if t != nil {
			head = t.Head
		}
	})
	return head, err
}

func (c *memoryConn) Sets(name string, f tracker.Family) (out map[string]nft.Set, err error) {
	missing := false
	err = c.dump(name, f, func(t *memoryTable) {
		if missing = t == nil; missing {
			return
		}
		out = map[string]nft.Set{}
		for name, set := range t.sets {
			out[name] = set.Set
		}
	})
	if missing {
		return nil, &Error{Errno: syscall.ENOENT}
	}
	return out, err
}

func (c *memoryConn) Chains(name string, f tracker.Family) (map[string]nft.Chain, error) {
	out := map[string]nft.Chain{}
	return out, c.dump(name, f, func(t *memoryTable) {
		if t == nil {
			return
		}
		for name, c := range t.chains {
			out[name] = nft.Chain{Base: c.base, Accepts: c.base != nil}
		}
	})
}

func (c *memoryConn) Flowtables(name string, f tracker.Family) (map[string]nft.Flowtable, error) {
	out := map[string]nft.Flowtable{}
	return out, c.dump(name, f, func(t *memoryTable) {
		if t == nil {
			return
		}
		for name, devices := range t.flowtables {
			out[name] = nft.Flowtable{Sound: true, Devices: devices}
		}
	})
}

func (c *memoryConn) Rules(name string, f tracker.Family) (out []nft.Rule, err error) {
	err = c.dump(name, f, func(t *memoryTable) {
		if out = nil; t == nil {
			return
		}
		for name, c := range t.chains {
			for _, r := range c.rules {
				out = append(out, nft.Rule{Handle: r.handle, Chain: name, Sum: r.sum})
			}
		}
	})
	return out, err
}

func (c *memoryConn) HasBaseChain(table string, f tracker.Family, chain string) (bool, error) {
	chains, err := c.Chains(table, f)
	return chains[chain].Base != nil, err
}

func (c *memoryConn) Elements(name string, f tracker.Family, s layout.Set, fn func(nft.Element)) error {
	missing := false
	err := c.dumpOnce(name, f, func(t *memoryTable) {
		if missing = t == nil || t.sets[s.Name()] == nil; missing {
			return
		}
		for _, e := range t.sets[s.Name()].elements {
			fn(e)
		}
	})
	if missing {
		return &Error{Errno: syscall.ENOENT}
	}
	return err
}

func (c *memoryConn) WatchCommits(ctx context.Context, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	for ctx.Err() == nil {
		switch err := check(ctx); {
		case errors.Is(err, os.ErrClosed):
			return err
		case err != nil && ctx.Err() == nil:
			failed(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(interval):
		}
	}
	return context.Cause(ctx)
}

func (c *memoryConn) Links() (map[string]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.links), nil
}

func (c *memoryConn) WatchLinks() (linkEvents, error) {
	return nil, errors.New("the kernel in memory has no notifications of interfaces")
}

// hooked returns the family's tables that packets meet, in the order in which they do.
func (m *memory) hooked(f tracker.Family) (out []*memoryTable) {
	for id, t := range m.tables {
		if id.family == f && t.chains[layout.ChainNATPrerouting] != nil && len(t.chains[layout.ChainNATPrerouting].rules) != 0 {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b *memoryTable) int {
		return cmp.Compare(a.chains[layout.ChainNATPrerouting].handle, b.chains[layout.ChainNATPrerouting].handle)
	})
	return out
}

// inUse returns the only table of a family that packets meet.
func (m *memory) inUse(f tracker.Family) *memoryTable {
	list := m.hooked(f)
	if len(list) != 1 {
		panic(fmt.Sprintf("%d tables are in use", len(list)))
	}
	return list[0]
}

// elements returns the elements of a set, nil if it is missing.
func (t *memoryTable) elements(s layout.Set) map[string]nft.Element {
	if set := t.sets[s.Name()]; set != nil {
		return set.elements
	}
	return nil
}
