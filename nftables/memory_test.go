package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/memory"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/tracker"
)

// memoryNode is a network namespace with a kernel in memory.
type memoryNode struct {
	memory.Kernel
	// fail, unless it is nil, is called before each commit. If it returns an error, the commit
	// fails with it. Every second failed commit takes effect, as if its answer was lost.
	fail func() error
	// look, unless it is nil, is called after each commit.
	look func()
	// limit, if not 0, is the largest transaction in bytes.
	limit int

	mu       sync.Mutex
	failures int
	// interrupted is the number of reads that fail because of a concurrent transaction.
	interrupted int
	// refusals holds the transactions that were refused.
	refusals []error
}

func newMemory() *memoryNode { return &memoryNode{Kernel: memory.Kernel{Strict: true}} }

// connect returns a connection for one Backend.
func (m *memoryNode) connect() *memoryConn { return &memoryConn{memoryNode: m} }

// alter is a change by another process.
func (m *memoryNode) alter(f tracker.Family, change func(*memory.Table)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Generation++
	change(m.inUse(f))
}

// table returns the table of a name, nil if it is missing.
func (m *memoryNode) table(name string, f tracker.Family) *memory.Table {
	return m.Tables[familyName(f)+" "+name]
}

func familyName(f tracker.Family) string {
	return map[tracker.Family]string{tracker.IPv4: "ip", tracker.IPv6: "ip6"}[f]
}

// inUse returns the only table of a family that packets meet.
func (m *memoryNode) inUse(f tracker.Family) (out *memory.Table) {
	for id, t := range m.Tables {
		if c := t.Chains[layout.ChainNATPrerouting]; strings.HasPrefix(id, familyName(f)+" ") && c != nil && len(c.Rules) != 0 {
			if out != nil {
				panic("several tables are in use")
			}
			out = t
		}
	}
	return out
}

// elementsIn returns the elements of a set, nil if it is missing.
func elementsIn(t *memory.Table, s layout.Set) map[string]nft.Element {
	if set := t.Sets[s.Name()]; set != nil {
		return set.Elements
	}
	return nil
}

// memoryWriter is a [writer].
type memoryWriter struct {
	*kernel.Text
	finished bool
	bytes    int
}

func (w *memoryWriter) Empty() bool { return w.Len() == 0 && w.Lists.Empty() }

func (w *memoryWriter) Reset() {
	w.Text.Reset()
	w.finished, w.bytes = false, 0
}

func (w *memoryWriter) Add(tx *model.Tx) {
	w.Text.Add(tx)
	for i := range tx.Objects {
		w.bytes += w.ObjectSize(&tx.Objects[i])
	}
}

// ObjectSize returns about the size that an object of the kind has for Linux.
func (w *memoryWriter) ObjectSize(o *model.Object) int {
	switch o.Kind {
	case model.FixedChains:
		return 6 << 10
	case model.BaseChains, model.HandlerChain:
		return 2 << 10
	}
	return 160
}

func (w *memoryWriter) elements(verb string, f tracker.Family, s layout.Set, list *nft.Elements) {
	w.Elements(verb, f, s, list)
	w.bytes += list.Size()
}

func (w *memoryWriter) AddElements(f tracker.Family, s layout.Set, list *nft.Elements) {
	w.elements("add element", f, s, list)
}

func (w *memoryWriter) DeleteElements(f tracker.Family, s layout.Set, list *nft.Elements) {
	w.elements("delete element", f, s, list)
}

func (w *memoryWriter) Finish() error {
	w.Each(func(f tracker.Family, s layout.Set, deletion bool, list *nft.Elements) {
		w.elements(map[bool]string{false: "create element", true: "delete element"}[deletion], f, s, list)
	})
	w.Lists.Reset()
	w.finished = true
	return nil
}

// memoryConn is one Backend's [connection].
type memoryConn struct {
	*memoryNode
	commits uint32
	closed  bool
}

var _ connection = &memoryConn{}

func (c *memoryConn) NewWriter(table string, rules ...kernel.Rules) writer {
	return &memoryWriter{Text: kernel.NewText(table, rules...)}
}

func (c *memoryConn) Commit(of writer) error {
	w := of.(*memoryWriter)
	if !w.finished {
		if err := w.Finish(); err != nil {
			return err
		}
	}
	if w.bytes > c.Limit() {
		return fmt.Errorf("%w: %d bytes, at most %d", model.ErrTooLarge, w.bytes, c.Limit())
	}
	if c.closed {
		return errClosed
	}
	if w.Empty() {
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
	if err := c.load(w.String()); err != nil {
		return errors.Join(lost, err)
	}
	if c.look != nil {
		c.look()
	}
	if lost == nil {
		c.commits++
	}
	return lost
}

// load applies a transaction.
func (m *memoryNode) load(text string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.Load(text)
	var errno syscall.Errno
	if errors.As(err, &errno) {
		err = &Error{Errno: errno, What: err.Error()}
	}
	if err != nil {
		m.refusals = append(m.refusals, err)
	}
	return err
}

func (c *memoryConn) Limit() int      { return cmp.Or(c.limit, 256<<20) }
func (c *memoryConn) Commits() uint32 { return c.commits }
func (c *memoryConn) Closed() bool    { return c.closed }
func (c *memoryConn) WaitForPackets() {}

func (c *memoryConn) Close() error {
	c.closed = true
	return nil
}

// read calls fn with a table, which is empty if it is missing.
func (c *memoryConn) read(name string, f tracker.Family, fn func(*memory.Table)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed
	}
	fn(cmp.Or(c.table(name, f), &memory.Table{}))
	return nil
}

// dump is like read, and fails if a transaction of another process interrupts it.
func (c *memoryConn) dump(name string, f tracker.Family, fn func(*memory.Table)) error {
	err := c.read(name, f, fn)
	if err == nil && c.interrupted > 0 {
		c.interrupted--
		err = fmt.Errorf("memory: %w", nfnl.ErrInterrupted)
	}
	return err
}

// objects returns the objects that of returns, of a table. It repeats an interrupted dump.
func objects[In, Out any](c *memoryConn, name string, f tracker.Family, of func(*memory.Table) map[string]In, convert func(In) Out) (map[string]Out, error) {
	out := map[string]Out{}
	return out, nfnl.Again(context.Background(), func() error {
		return c.dump(name, f, func(t *memory.Table) {
			clear(out)
			for name, object := range of(t) {
				out[name] = convert(object)
			}
		})
	})
}

func (c *memoryConn) Generation() (gen uint32, err error) {
	err = c.read("", 0, func(*memory.Table) { gen = c.Kernel.Generation })
	return gen, err
}

func (c *memoryConn) Table(name string, f tracker.Family) (head nft.Head, err error) {
	err = c.read(name, f, func(t *memory.Table) { head = nft.Head{Exists: t.Handle != 0, Handle: t.Handle} })
	return head, err
}

func (c *memoryConn) Sets(name string, f tracker.Family) (map[string]nft.Set, error) {
	out, err := objects(c, name, f, func(t *memory.Table) map[string]*memory.Set { return t.Sets }, func(s *memory.Set) nft.Set { return s.Set })
	if head, _ := c.Table(name, f); err == nil && !head.Exists {
		err = &Error{Errno: syscall.ENOENT}
	}
	return out, err
}

func chainsOf(t *memory.Table) map[string]*memory.Chain { return t.Chains }

func (c *memoryConn) Chains(name string, f tracker.Family) (map[string]nft.Chain, error) {
	return objects(c, name, f, chainsOf, func(c *memory.Chain) nft.Chain { return nft.Chain{Base: c.Base, Accepts: c.Base != nil} })
}

func (c *memoryConn) Flowtables(name string, f tracker.Family) (map[string]nft.Flowtable, error) {
	return objects(c, name, f, func(t *memory.Table) map[string]map[string]bool { return t.Flowtables }, func(devices map[string]bool) nft.Flowtable {
		return nft.Flowtable{Sound: true, Devices: devices}
	})
}

func (c *memoryConn) Rules(name string, f tracker.Family) (out []nft.Rule, err error) {
	chains, err := objects(c, name, f, chainsOf, func(c *memory.Chain) []*memory.Rule { return c.Rules })
	for name, rules := range chains {
		for _, r := range rules {
			out = append(out, nft.Rule{Handle: r.Handle, Chain: name})
		}
	}
	return out, err
}

func (c *memoryConn) HasBaseChain(table string, f tracker.Family, chain string) (bool, error) {
	chains, err := c.Chains(table, f)
	return chains[chain].Base != nil, err
}

func (c *memoryConn) Elements(name string, f tracker.Family, s layout.Set, fn func(nft.Element)) error {
	var missing error
	err := c.dump(name, f, func(t *memory.Table) {
		if t.Sets[s.Name()] == nil {
			missing = &Error{Errno: syscall.ENOENT}
			return
		}
		for _, e := range t.Sets[s.Name()].Elements {
			fn(e)
		}
	})
	return cmp.Or(missing, err)
}

func (c *memoryConn) WatchCommits(context.Context, time.Duration, func(context.Context) error, func(error)) error {
	return errors.ErrUnsupported
}

func (c *memoryConn) Links() (map[string]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.Kernel.Links), nil
}

func (c *memoryConn) WatchLinks() (linkEvents, error) {
	return nil, errors.ErrUnsupported
}
