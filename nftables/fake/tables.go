// Package fake is a kernel with nf_tables in memory, for tests on every system. It applies the text of
// transactions, lists tables, and sends packets through their rules:
//
//	tables := fake.New()
//	err := tables.Load(tx.String()) // of an nftables.Transaction
//	got := tables.Handle(packet)    // what happens to a ruleset.Packet
//
// It is a simulator, not a mock: like the kernel, it applies a text as a whole or not at all, and refuses
// what refers to missing objects, elements that exist, and sets that are too small. Rules are interpreted as
// they are written. It knows the syntax that package nftables uses, with a command, definition, rule or
// element on a line.
package fake

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/go-proxier/proxier/internal/nft"
)

// Tables holds tables of all families. [New] makes one. Its methods may be called concurrently.
type Tables struct {
	// Before, unless it is nil, is called with each text. An error is the result of Load, and the text has
	// no effect.
	Before func(text string) error
	// After, unless it is nil, is called after a text that was applied.
	After func(text string)

	mu     sync.Mutex
	tables map[string]*table // by family and name, as "ip proxier"
	// hooks holds the base chains of each family and hook, in their order.
	hooks  map[string][]place
	packet packet // that Handle sends
}

type place struct {
	*table
	*chain
}

type table struct {
	name    string
	sets    map[string]*set
	chains  map[string]*chain
	objects []string        // as "chain services", in the order of their creation
	deleted map[string]bool // the objects that the text in progress deletes
}

type set struct {
	kind, name string // kind is "set" or "map"
	// owner is the loader that may change the elements. Another one makes a copy.
	owner    *loader
	lines    []string
	interval bool
	size     int
	elements map[string]element // by key
}

type element struct {
	text string // as written
	data string
	// fields holds the fields of the key of a set of intervals.
	fields []interval
}

type chain struct {
	name  string
	hook  string
	base  *base
	rules []*rule
}

// base is the place of a base chain.
type base struct {
	nat      bool
	hook     string
	priority int
}

// New returns a kernel without tables.
func New() *Tables { return &Tables{tables: map[string]*table{}} }

// Load applies a text as "nft -f" does: as a whole or, if it returns an error, not at all. The error wraps
// a [syscall.Errno] if the kernel would refuse the text.
func (t *Tables) Load(text string) error {
	if t.Before != nil {
		if err := t.Before(text); err != nil {
			return err
		}
	}
	if err := t.load(text); err != nil {
		return fmt.Errorf("fake: %w", err)
	}
	if t.After != nil {
		t.After(text)
	}
	return nil
}

func (t *Tables) load(text string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := &loader{tables: map[string]*table{}}
	for name, old := range t.tables {
		l.tables[name] = old.clone()
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		if err := l.line(strings.TrimSpace(line)); err != nil {
			return fmt.Errorf("line %d, %q: %w", n, strings.TrimSpace(line), err)
		}
	}
	for _, table := range l.tables {
		if err := table.check(); err != nil {
			return err
		}
	}
	t.tables, t.hooks = l.tables, map[string][]place{}
	for _, id := range slices.Sorted(maps.Keys(t.tables)) {
		table := t.tables[id]
		family, _, _ := strings.Cut(id, " ")
		for _, object := range table.objects {
			if c := table.chains[strings.TrimPrefix(object, "chain ")]; c != nil && c.base != nil {
				at := family + " " + c.base.hook
				t.hooks[at] = append(t.hooks[at], place{table, c})
			}
		}
	}
	for _, chains := range t.hooks {
		slices.SortStableFunc(chains, func(a, b place) int { return cmp.Compare(a.base.priority, b.base.priority) })
	}
	return nil
}

// List returns the tables as nft lists them: sets and then chains in the order of their creation, and
// elements in the order of their text.
func (t *Tables) List() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(t.tables)) {
		table := t.tables[name]
		fmt.Fprintf(&b, "table %s {\n", name)
		for _, ofChains := range [...]bool{false, true} {
			for _, object := range table.objects {
				kind, name, _ := strings.Cut(object, " ")
				switch {
				case ofChains != (kind == "chain"):
				case ofChains:
					fmt.Fprintf(&b, "\t%s {\n\t\t%s\n\t}\n", object, strings.Join(table.chains[name].list(), "\n\t\t"))
				default:
					fmt.Fprintf(&b, "\t%s {\n\t\t%s\n\t}\n", object, strings.Join(table.sets[name].list(), "\n\t\t"))
				}
			}
		}
		b.WriteString("}\n")
	}
	return b.String()
}

func (c *chain) list() (out []string) {
	if c.hook != "" {
		out = append(out, c.hook)
	}
	for _, r := range c.rules {
		out = append(out, r.text)
	}
	return out
}

func (s *set) list() []string {
	var texts []string
	for _, e := range s.elements {
		texts = append(texts, "\t"+e.text)
	}
	if texts == nil {
		return s.lines
	}
	slices.Sort(texts)
	return append(s.lines[:len(s.lines):len(s.lines)], "elements = {", strings.Join(texts, ",\n\t\t"), "}")
}

// clone returns a copy. Chains are never changed in place, and neither are the sets of other loaders.
func (t *table) clone() *table {
	return &table{name: t.name, sets: maps.Clone(t.sets), chains: maps.Clone(t.chains), objects: slices.Clone(t.objects), deleted: map[string]bool{}}
}

// check returns an error if a rule or an element refers to what does not exist.
func (t *table) check() error {
	missing := func(name, by string) error {
		errno := syscall.ENOENT
		if t.deleted[name] {
			errno = syscall.EBUSY
		}
		return fmt.Errorf("%s, to which %q refers: %w", name, by, errno)
	}
	for _, c := range t.chains {
		for _, r := range c.rules {
			for _, name := range r.chains {
				if t.chains[name] == nil {
					return missing(name, r.text)
				}
			}
			for _, name := range r.sets {
				if t.sets[name] == nil {
					return missing(name, r.text)
				}
			}
		}
	}
	for _, s := range t.sets {
		if s.size != 0 && len(s.elements) > s.size {
			return fmt.Errorf("set %s: %w", s.name, syscall.ENFILE)
		}
		for _, e := range s.elements {
			if to, ok := strings.CutPrefix(e.data, "goto "); ok && t.chains[to] == nil {
				return missing(to, e.text)
			}
		}
	}
	return nil
}

// loader applies a text line by line.
type loader struct {
	tables map[string]*table
	// block is the table that is being defined, and inner reads the lines of an object or elements in it.
	block *table
	inner func(line string) error
}

func (l *loader) line(line string) error {
	switch {
	case line == "" || line[0] == '#':
	case line == "}" && l.inner != nil:
		l.inner = nil
	case line == "}":
		l.block = nil
	case l.inner != nil:
		return l.inner(line)
	case l.block != nil:
		return l.define(l.block, strings.TrimSuffix(line, " {"))
	default:
		return l.command(line)
	}
	return nil
}

// define begins the definition of an object, which may exist.
func (l *loader) define(t *table, object string) error {
	kind, name, _ := strings.Cut(object, " ")
	known := slices.Contains(t.objects, object)
	if !known && kind != "flowtable" {
		t.objects = append(t.objects, object)
	}
	switch kind {
	case "chain":
		c := &chain{name: name}
		if known {
			*c = *t.chains[name]
			c.rules = slices.Clone(c.rules)
		}
		t.chains[name] = c
		l.inner = func(line string) error {
			if strings.HasPrefix(line, "type ") {
				return c.attach(line)
			}
			r, err := parseRule(line)
			c.rules = append(c.rules, r)
			return err
		}
	case "set", "map":
		s := &set{kind: kind, name: name, owner: l, elements: map[string]element{}}
		if known {
			s = &set{} // the definition changes nothing
		} else {
			t.sets[name] = s
		}
		l.inner = func(line string) error {
			s.lines = append(s.lines, line)
			s.interval = s.interval || line == "flags interval"
			if size, ok := strings.CutPrefix(line, "size "); ok {
				n, err := strconv.Atoi(size)
				s.size = n
				return err
			}
			return nil
		}
	case "flowtable": // no packet takes the fast path
		l.inner = func(string) error { return nil }
	default:
		return syscall.EOPNOTSUPP
	}
	return nil
}

// attach makes the chain a base chain.
func (c *chain) attach(line string) error {
	var kind string
	b := &base{}
	_, err := fmt.Sscanf(line, "type %s hook %s priority %d;", &kind, &b.hook, &b.priority)
	b.nat = kind == "nat"
	c.hook, c.base = line, b
	return err
}

// command applies a command.
func (l *loader) command(line string) error {
	w := nft.Words(line)
	verb, kind := w.Next(), ""
	if verb != "table" {
		kind = w.Next()
	}
	id := w.Next() + " " + w.Next()
	t := l.tables[id]
	switch {
	case kind == "table" && verb == "create" && t != nil:
		return syscall.EEXIST
	case verb == "table" || kind == "table" && (verb == "create" || verb == "add"):
		if t == nil {
			t = &table{name: id, sets: map[string]*set{}, chains: map[string]*chain{}, deleted: map[string]bool{}}
			l.tables[id] = t
		}
		if verb == "table" {
			l.block = t
		}
		return nil
	case t == nil:
		return syscall.ENOENT
	}
	name := w.Next()
	switch verb + " " + kind {
	case "delete table":
		delete(l.tables, id)
	case "flush table":
		for name, c := range t.chains {
			t.chains[name] = &chain{name: name, hook: c.hook, base: c.base}
		}
	case "flush chain":
		c := t.chains[name]
		if c == nil {
			return syscall.ENOENT
		}
		t.chains[name] = &chain{name: name, hook: c.hook, base: c.base}
	case "delete chain", "delete set":
		object := slices.IndexFunc(t.objects, func(o string) bool { return strings.HasSuffix(o, " "+name) })
		if object < 0 {
			return syscall.ENOENT
		}
		t.objects = slices.Delete(t.objects, object, object+1)
		delete(t.chains, name)
		delete(t.sets, name)
		t.deleted[name] = true
	case "add rule", "insert rule":
		if t.chains[name] == nil {
			return syscall.ENOENT
		}
		c := *t.chains[name]
		r, err := parseRule(string(w))
		if c.rules = append(slices.Clone(c.rules), r); verb == "insert" {
			c.rules = append([]*rule{r}, t.chains[name].rules...)
		}
		t.chains[name] = &c
		return err
	case "create element", "add element", "delete element":
		s := t.sets[name]
		if s == nil {
			return syscall.ENOENT
		}
		if s.owner != l {
			copied := *s
			copied.owner, copied.elements = l, maps.Clone(s.elements)
			s = &copied
			t.sets[name] = s
		}
		l.inner = func(line string) error { return s.edit(verb, strings.TrimSuffix(line, ",")) }
	case "add flowtable", "delete flowtable":
	default:
		return syscall.EOPNOTSUPP
	}
	return nil
}

// edit adds an element to the set or deletes it.
func (s *set) edit(verb, text string) error {
	e := element{text: text}
	key, data, _ := strings.Cut(text, " : ")
	key, _, _ = strings.Cut(key, " comment ")
	key, _, _ = strings.Cut(key, " timeout ")
	e.data = data
	if s.interval {
		for field := range strings.SplitSeq(key, " . ") {
			e.fields = append(e.fields, parseInterval(field))
		}
	}
	old, exists := s.elements[key]
	switch {
	case verb == "delete" && !exists:
		return syscall.ENOENT
	case verb == "delete":
		delete(s.elements, key)
	case exists && (verb == "create" || old.data != data):
		return syscall.EEXIST
	default:
		s.elements[key] = e
	}
	return nil
}
