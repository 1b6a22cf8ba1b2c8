// Package memory is a kernel with nf_tables in memory, which package fake exports.
package memory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/go-proxier/proxier/internal/nft"
)

// Kernel is nf_tables of a network namespace. The zero value has no tables. It is not safe for concurrent use.
type Kernel struct {
	// Tables holds the tables by family and name, as "ip proxier".
	Tables map[string]*Table
	// Generation is the number of transactions that changed something.
	Generation uint32
	// Written is the number of elements that were added or deleted.
	Written int
	// Links holds the interfaces that a flowtable may have. If it is nil, a flowtable may have any.
	Links map[string]int
	// Strict refuses definitions in a table that is missing, as the kernel does. The tool creates the table.
	Strict bool

	handles uint64
	// hooks holds the base chains of each family and hook, in their order.
	hooks  map[string][]place
	packet packet // that Handle sends
}

type place struct {
	*Table
	*Chain
}

// Table is a table.
type Table struct {
	Handle uint64
	Sets   map[string]*Set
	Chains map[string]*Chain
	// Flowtables holds the interfaces of each flowtable.
	Flowtables map[string]map[string]bool
	objects    []string // chains and sets as "chain services", in the order of their creation
}

// Chain is a chain.
type Chain struct {
	// Base is nil for a chain without hook.
	Base  *nft.BaseChain
	Rules []*Rule
	name  string
	hook  string // as written
}

// Load applies a text, or returns an error that wraps a [syscall.Errno] if the kernel would refuse it.
func (k *Kernel) Load(text string) error {
	l := &loader{Kernel: *k}
	l.Tables = map[string]*Table{}
	for name, old := range k.Tables {
		// Chains are never changed in place, and neither are the sets of other loaders.
		l.Tables[name] = &Table{old.Handle, maps.Clone(old.Sets), maps.Clone(old.Chains), maps.Clone(old.Flowtables), slices.Clone(old.objects)}
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if err := l.line(line); err != nil {
			return fmt.Errorf("line %d, %q: %w", n, line, err)
		}
	}
	for _, r := range l.references {
		if t := r.table; slices.Contains(slices.Collect(maps.Values(l.Tables)), t) && t.Chains[r.to] == nil && t.Sets[r.to] == nil {
			return fmt.Errorf("%s, to which %q refers: %w", r.to, r.by, syscall.ENOENT)
		}
	}
	if l.changed {
		l.Generation++
	}
	*k = l.Kernel
	k.hooks = map[string][]place{}
	for _, id := range slices.Sorted(maps.Keys(k.Tables)) {
		t := k.Tables[id]
		family, _, _ := strings.Cut(id, " ")
		for _, object := range t.objects {
			c := t.Chains[strings.TrimPrefix(object, "chain ")]
			if c == nil || c.Base == nil {
				continue
			}
			for name, hook := range nft.Hooks() {
				if at := family + " " + name; hook == c.Base.Hook {
					k.hooks[at] = append(k.hooks[at], place{t, c})
				}
			}
		}
	}
	for _, chains := range k.hooks {
		slices.SortStableFunc(chains, func(a, b place) int { return cmp.Compare(a.Base.Priority, b.Base.Priority) })
	}
	return nil
}

// List returns the tables as nft lists them.
func (k *Kernel) List() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(k.Tables)) {
		t := k.Tables[name]
		fmt.Fprintf(&b, "table %s {\n", name)
		var chains strings.Builder
		for _, object := range t.objects {
			kind, name, _ := strings.Cut(object, " ")
			if kind == "chain" {
				fmt.Fprintf(&chains, "\t%s {\n\t\t%s\n\t}\n", object, strings.Join(t.Chains[name].list(), "\n\t\t"))
			} else {
				fmt.Fprintf(&b, "\t%s {\n\t\t%s\n\t}\n", object, strings.Join(t.Sets[name].list(), "\n\t\t"))
			}
		}
		b.WriteString(chains.String() + "}\n")
	}
	return b.String()
}

func (c *Chain) list() (out []string) {
	if c.hook != "" {
		out = append(out, c.hook)
	}
	for _, r := range c.Rules {
		out = append(out, r.text)
	}
	return out
}

// inUse reports whether an element, or a rule of another chain, refers to a chain or set.
func (t *Table) inUse(name string) bool {
	for _, s := range t.Sets {
		if s.DataType != nft.DataVerdict {
			continue
		}
		for _, e := range s.Elements {
			if e.Chain == name {
				return true
			}
		}
	}
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			if c.name != name && slices.Contains(r.refers, name) {
				return true
			}
		}
	}
	return false
}

// loader applies a text line by line to a copy of a kernel.
type loader struct {
	Kernel
	changed bool
	// references are what new rules and elements refer to.
	references []reference
	// block is the table that is being defined, and inner reads the lines of an object or elements in it.
	block *Table
	inner func(line string) error
}

type reference struct {
	table  *Table
	to, by string
}

func (l *loader) handle() uint64 {
	l.handles++
	return l.handles
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
func (l *loader) define(t *Table, object string) error {
	kind, name, _ := strings.Cut(object, " ")
	known := kind == "flowtable" || kind == "chain" && t.Chains[name] != nil || t.Sets[name] != nil
	if !known {
		t.objects = append(slices.DeleteFunc(t.objects, func(o string) bool { return o == object }), object)
		l.changed = true
	}
	switch kind {
	case "chain":
		c := &Chain{name: name}
		if known {
			*c = *t.Chains[name]
		}
		t.Chains[name] = c
		l.inner = func(line string) error {
			if strings.HasPrefix(line, "type ") {
				if known && c.Base == nil {
					return syscall.EEXIST
				}
				base, err := nft.ParseHook(line)
				c.hook, c.Base = line, base
				return err
			}
			return l.rule(t, c, line, len(c.Rules))
		}
	case "set", "map":
		s := &Set{owner: l, Elements: map[string]nft.Element{}}
		if known {
			s = &Set{} // the definition changes nothing
		} else {
			t.Sets[name] = s
		}
		s.Count = -1
		if kind == "map" {
			s.Flags = nft.FlagMap
		}
		l.inner = s.attribute
	case "flowtable": // no packet takes the fast path
		t.Flowtables[name] = map[string]bool{}
		l.changed = true
		l.inner = func(string) error { return nil }
	default:
		return syscall.EOPNOTSUPP
	}
	return nil
}

func (l *loader) rule(t *Table, c *Chain, text string, at int) error {
	r, err := parseRule(text)
	if err != nil {
		return err
	}
	r.Handle = l.handle()
	c.Rules = slices.Insert(slices.Clone(c.Rules), at, r)
	for _, to := range r.refers {
		l.references = append(l.references, reference{t, to, text})
	}
	l.changed = true
	return nil
}

func (l *loader) command(line string) error {
	w := nft.Words(line)
	verb, kind := w.Next(), ""
	if verb != "table" {
		kind = w.Next()
	}
	id := w.Next() + " " + w.Next()
	t := l.Tables[id]
	switch {
	case kind == "table" && verb == "create" && t != nil:
		return syscall.EEXIST
	case verb == "table" && t == nil && l.Strict:
		return syscall.ENOENT
	case verb == "table" || kind == "table" && (verb == "create" || verb == "add"):
		if t == nil {
			t = &Table{l.handle(), map[string]*Set{}, map[string]*Chain{}, map[string]map[string]bool{}, nil}
			l.Tables[id], l.changed = t, true
		}
		if verb == "table" {
			l.block = t
		}
		return nil
	case t == nil:
		return syscall.ENOENT
	}
	name := w.Next()
	c, s, devices := t.Chains[name], t.Sets[name], t.Flowtables[name]
	var chain Chain // a copy to change
	switch {
	case kind == "chain" && c == nil, kind == "rule" && c == nil, kind == "set" && s == nil, kind == "element" && s == nil, kind == "flowtable" && devices == nil:
		return syscall.ENOENT
	case c != nil:
		chain = *c
	}
	l.changed = l.changed || kind != "element"
	switch verb + " " + kind {
	case "delete table":
		delete(l.Tables, id)
	case "flush table":
		for name, c := range t.Chains {
			t.Chains[name] = &Chain{c.Base, nil, name, c.hook}
		}
	case "flush chain":
		chain.Rules = nil
		t.Chains[name] = &chain
	case "delete chain", "delete set":
		if t.inUse(name) {
			return syscall.EBUSY
		}
		t.objects = slices.DeleteFunc(t.objects, func(o string) bool { return o == kind+" "+name || kind == "set" && o == "map "+name })
		if kind == "set" {
			delete(t.Sets, name)
		} else {
			delete(t.Chains, name)
		}
	case "add rule", "insert rule":
		t.Chains[name] = &chain
		return l.rule(t, &chain, string(w), map[string]int{"add": len(chain.Rules)}[verb])
	case "create element", "add element", "delete element":
		if s.owner != l {
			copied := *s
			copied.owner, copied.Elements = l, maps.Clone(s.Elements)
			s = &copied
			t.Sets[name] = s
		}
		l.inner = func(line string) error { return l.elements(t, s, verb, strings.TrimSuffix(line, ",")) }
	case "delete flowtable", "add flowtable":
		_, list, ok := strings.Cut(string(w), "devices = { ")
		if !ok {
			delete(t.Flowtables, name)
			return nil
		}
		t.Flowtables[name] = maps.Clone(devices)
		list, _, _ = strings.Cut(list, " }")
		for device := range strings.SplitSeq(list, ", ") {
			_, exists := l.Links[device]
			had := t.Flowtables[name][device]
			switch {
			case verb == "add" && !exists && l.Links != nil, verb == "delete" && !had:
				return syscall.ENOENT
			case verb == "add" && had:
				return syscall.EEXIST
			}
			if t.Flowtables[name][device] = true; verb == "delete" {
				delete(t.Flowtables[name], device)
			}
		}
	default:
		return syscall.EOPNOTSUPP
	}
	return nil
}

func (s *Set) attribute(line string) (err error) {
	s.lines = append(s.lines, line)
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "type", "typeof":
		key, data, _ := strings.Cut(rest, " : ")
		if s.KeyType, s.KeyLen, err = parseTypes(verb, key); data != "" && err == nil {
			s.DataType, s.DataLen, err = parseTypes(verb, data)
		}
	case "size":
		s.Size, err = strconv.Atoi(rest)
	case "flags":
		for name := range strings.SplitSeq(rest, ",") {
			s.Flags |= nft.SetFlags()[name]
		}
	}
	return err
}

// parseTypes reads names of types, or values of which a key or data consists.
func parseTypes(verb, text string) (typ, length uint32, err error) {
	if verb == "type" {
		types, err := nft.ParseTypes(text)
		typ, length = nft.Concat(types...)
		return typ, length, err
	}
	p := &parser{Words: nft.Words(text), Rule: &Rule{}}
	_, typ = p.concatenation()
	if p.unknown {
		return 0, 0, syscall.EOPNOTSUPP
	}
	typ, length = nft.Concat(nft.TypesOf(typ)...)
	return typ, length, nil
}
