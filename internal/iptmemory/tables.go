// Package iptmemory is the kernel with iptables in memory behind package iptables/fake, with the interface that the
// tests of packages iptables and ipvs need: options of the programs, faults, and packets that IPVS changes on their way.
package iptmemory

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptool"
)

// Tables holds the tables of one family. [New] makes one. Its methods may be called concurrently.
type Tables struct {
	// Before, unless nil, is called with each input that changes something. Its error is Restore's, without an effect.
	Before func(input string) error
	// After, unless nil, is called after each of them. Its error is Restore's, although the input is in effect.
	After func(input string) error
	// Accounting, unless nil, reports whether there is an accounting object (nfacct) of the name. Rules name no other.
	Accounting func(name string) bool

	mu      sync.Mutex
	tables  map[string]table
	commits uint32
}

// table holds the chains of a table. A chain is never changed in place, so that a copy of the
// map is a copy of the table.
type table map[string]*chain

type chain struct {
	builtin bool
	rules   []rule
}

type rule struct {
	iptext.Rule
	matches        []match
	text           string
	packets, bytes uint64
}

// match is a match of a rule with its parsed value.
type match struct {
	iptext.Option
	prefix      netip.Prefix
	from, to    uint64 // ports, or a number
	probability float64
	mark, mask  uint32
}

// builtin holds the kernel's own chains by table.
var builtin = map[string][]string{
	"filter": {"INPUT", "FORWARD", "OUTPUT"},
	"nat":    {"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"},
	"mangle": {"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"},
}

// New returns empty tables filter, nat and mangle.
func New() *Tables {
	t := &Tables{tables: map[string]table{}}
	for name := range builtin {
		t.tables[name] = emptyTable(name)
	}
	return t
}

func emptyTable(name string) table {
	out := table{}
	for _, c := range builtin[name] {
		out[c] = &chain{builtin: true}
	}
	return out
}

// Commits returns how many transactions changed the tables.
func (t *Tables) Commits() uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.commits
}

// Count returns the number of rules of a chain, 0 if it does not exist.
func (t *Tables) Count(table, chain string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.tables[table][chain]; c != nil {
		return len(c.rules)
	}
	return 0
}

// Size returns the number of chains and rules of a table.
func (t *Tables) Size(table string) (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.tables[table] {
		n += 1 + len(c.rules)
	}
	return n
}

// Save prints a table, or all if table is "". The option "-c" adds the counters of rules. The error is ctx's,
// or that of out.
func (t *Tables) Save(ctx context.Context, table string, out io.Writer, options ...string) error {
	if err := ctx.Err(); err != nil {
		return &iptool.Error{Program: "memory-save", Status: -1, Cause: err}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(t.tables)) {
		if table != "" && name != table {
			continue
		}
		chains := t.tables[name]
		order := slices.Clone(builtin[name])
		for _, c := range slices.Sorted(maps.Keys(chains)) {
			if !chains[c].builtin {
				order = append(order, c)
			}
		}
		fmt.Fprintf(&b, "# saved\n*%s\n", name)
		for _, c := range order {
			policy := "-"
			if chains[c].builtin {
				policy = "ACCEPT"
			}
			fmt.Fprintf(&b, ":%s %s [0:0]\n", c, policy)
		}
		for _, c := range order {
			for _, r := range chains[c].rules {
				if slices.Contains(options, "-c") {
					fmt.Fprintf(&b, "[%d:%d] ", r.packets, r.bytes)
				}
				fmt.Fprintf(&b, "-A %s %s\n", c, r.text)
			}
		}
		b.WriteString("COMMIT\n")
	}
	_, err := out.Write(b.Bytes())
	return err
}

// Restore applies an input as iptables-restore --noflush does. The option "--test" only checks
// it. The error is an [*iptool.Error] unless Before or After returned another.
func (t *Tables) Restore(ctx context.Context, input []byte, options ...string) error {
	return t.restore(ctx, string(input), true, slices.Contains(options, "--test"))
}

// Load applies an input as iptables-restore does without --noflush: it empties the tables of the
// input first. Its errors are those of Restore.
func (t *Tables) Load(input string) error {
	return t.restore(context.Background(), input, false, false)
}

func (t *Tables) restore(ctx context.Context, input string, keep, test bool) error {
	if err := ctx.Err(); err != nil {
		return &iptool.Error{Program: "memory-restore", Status: -1, Cause: err}
	}
	changes := false
	for line := range strings.Lines(input) {
		changes = changes || strings.HasPrefix(line, ":") || strings.HasPrefix(line, "-") && !strings.HasPrefix(line, "-C ")
	}
	changes = (changes || !keep) && !test
	if changes && t.Before != nil {
		if err := t.Before(input); err != nil {
			return err
		}
	}
	if err := t.apply(input, keep, changes); err != nil {
		return err
	}
	if changes && t.After != nil {
		return t.After(input)
	}
	return nil
}

// apply applies an input, and nothing of it unless commit is set.
func (t *Tables) apply(input string, keep, commit bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	name, n := "", 0
	var work table
	for line := range strings.Lines(input) {
		n++
		line = strings.TrimSuffix(line, "\n")
		refuse := func(why string) error {
			return &iptool.Error{Program: "memory-restore", Status: 1, Line: n, Text: line, Message: fmt.Sprintf("line %d failed: %s", n, why)}
		}
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '*':
			name = line[1:]
			if t.tables[name] == nil {
				return refuse("no such table")
			}
			work = maps.Clone(t.tables[name])
			if !keep {
				work = emptyTable(name)
			}
		case name == "":
			return refuse("outside of a table")
		case line == "COMMIT":
			if commit {
				t.tables[name] = work
				t.commits++
			}
			name = ""
		default:
			if err := t.command(work, line); err != nil {
				return refuse(err.Error())
			}
		}
	}
	if name != "" {
		return &iptool.Error{Program: "memory-restore", Status: 1, Message: "COMMIT expected"}
	}
	return nil
}

// maxName is the most bytes of a chain's name: XT_EXTENSION_MAXNAMELEN, less the NUL.
const maxName = 28

func (t *Tables) command(work table, line string) error {
	if strings.HasPrefix(line, ":") {
		name, policy, _ := strings.Cut(line[1:], " ")
		switch c := work[name]; {
		case c == nil && strings.HasPrefix(policy, "- "):
			return work.create(name)
		case c == nil:
			return fmt.Errorf("no built-in chain %q", name)
		case !c.builtin:
			work[name] = &chain{}
		}
		return nil
	}
	op, rest, _ := strings.Cut(line, " ")
	name, text, _ := strings.Cut(rest, " ")
	if op == "-N" {
		return work.create(name)
	}
	c := work[name]
	if c == nil {
		return fmt.Errorf("no chain %q", name)
	}
	rules := slices.Clone(c.rules)
	switch op {
	case "-F":
		rules = nil
	case "-X":
		switch {
		case c.builtin || len(c.rules) != 0:
			return fmt.Errorf("chain %q is not empty", name)
		case work.leadsTo(name):
			return fmt.Errorf("a rule leads to chain %q", name)
		}
		delete(work, name)
		return nil
	case "-A", "-I":
		at := len(rules)
		if op == "-I" {
			at = 0
			if number, after, ok := strings.Cut(text, " "); ok && strings.Trim(number, "0123456789") == "" {
				i, err := strconv.Atoi(number)
				if err != nil || i < 1 || i > len(rules)+1 {
					return fmt.Errorf("no place %q", number)
				}
				at, text = i-1, after
			}
		}
		r, err := t.parse(work, text)
		if err != nil {
			return err
		}
		rules = slices.Insert(rules, at, r)
	case "-D", "-C":
		i := slices.IndexFunc(rules, func(r rule) bool { return r.text == text })
		if n, err := strconv.Atoi(text); err == nil && op == "-D" {
			i = n - 1
		}
		if i < 0 || i >= len(rules) {
			return fmt.Errorf("no such rule")
		}
		if op == "-C" {
			return nil
		}
		rules = slices.Delete(rules, i, i+1)
	default:
		return fmt.Errorf("unknown command %q", op)
	}
	work[name] = &chain{builtin: c.builtin, rules: rules}
	return nil
}

func (t table) create(name string) error {
	if t[name] != nil {
		return fmt.Errorf("chain %q exists", name)
	}
	if name == "" || len(name) > maxName || name[0] == '-' || strings.ContainsAny(name, " !\t\"") {
		return fmt.Errorf("bad name %q of a chain", name)
	}
	t[name] = &chain{}
	return nil
}

func (t table) leadsTo(name string) bool {
	for _, c := range t {
		if slices.ContainsFunc(c.rules, func(r rule) bool { return r.Target == name }) {
			return true
		}
	}
	return false
}

// targets lists the targets that are no chains, with their options.
var targets = map[string][]string{
	"": nil, "ACCEPT": nil, "DROP": nil, "RETURN": nil,
	"REJECT": {"--reject-with"}, "DNAT": {"--to-destination"}, "MASQUERADE": {"--random-fully"},
	"MARK": {"--set-xmark"}, "SET": {"--map-set", "--map-mark"},
}

// parse checks a rule and returns its parts.
func (t *Tables) parse(work table, text string) (rule, error) {
	out := rule{text: text}
	if after, ok := strings.CutPrefix(text, "-c "); ok {
		words := strings.SplitN(after, " ", 3)
		if len(words) != 3 {
			return out, fmt.Errorf("bad counters")
		}
		var err1, err2 error
		out.packets, err1 = strconv.ParseUint(words[0], 10, 64)
		out.bytes, err2 = strconv.ParseUint(words[1], 10, 64)
		if err1 != nil || err2 != nil {
			return out, fmt.Errorf("bad counters")
		}
		out.text = words[2]
	}
	if strings.Count(out.text, `"`)%2 != 0 || strings.ContainsAny(out.text, "\n\x00\\") {
		return out, fmt.Errorf("bad quotes")
	}
	out.Rule = iptext.ParseRule(out.text)
	for _, o := range out.Matches {
		m, err := t.parseMatch(o)
		if err != nil {
			return out, err
		}
		out.matches = append(out.matches, m)
	}
	options, ok := targets[out.Target]
	if c := work[out.Target]; !ok && (c == nil || c.builtin) {
		return out, fmt.Errorf("no chain or target %q", out.Target)
	}
	for _, o := range out.Options {
		if !slices.Contains(options, o.Name) {
			return out, fmt.Errorf("unknown option %q of target %s", o.Name, out.Target)
		}
	}
	if out.Target == "DNAT" {
		if _, err := netip.ParseAddrPort(out.Option("--to-destination")); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (t *Tables) parseMatch(o iptext.Option) (m match, err error) {
	m.Option = o
	switch o.Name {
	case "-s", "-d":
		m.prefix, err = netip.ParsePrefix(o.Value)
	case "--dport":
		from, to, isRange := strings.Cut(o.Value, ":")
		m.from, err = strconv.ParseUint(from, 10, 16)
		m.to = m.from
		if err == nil && isRange {
			m.to, err = strconv.ParseUint(to, 10, 16)
		}
	case "--probability":
		if m.probability, err = strconv.ParseFloat(o.Value, 64); err == nil && (m.probability < 0 || m.probability > 1) {
			err = fmt.Errorf("probability %v", m.probability)
		}
	case "--seconds":
		m.from, err = strconv.ParseUint(o.Value, 10, 32)
	case "--mark":
		m.mark, m.mask, err = parseMark(o.Value)
	case "--nfacct-name":
		if t.Accounting != nil && !t.Accounting(o.Value) {
			err = fmt.Errorf("no accounting object %q", o.Value)
		}
	case "-p", "-i", "--ctstate", "--src-type", "--dst-type", "--mode", "--name", "--mask", "--match-set":
		if o.Value == "" || strings.Contains(o.Value, " ") && o.Name != "--match-set" {
			err = fmt.Errorf("bad value %q of option %s", o.Value, o.Name)
		}
	case "--rcheck", "--reap", "--set", "--rsource", "--ipvs":
		if o.Value != "" {
			err = fmt.Errorf("unexpected value %q of option %s", o.Value, o.Name)
		}
	default:
		err = fmt.Errorf("unknown option %q", o.Name)
	}
	return m, err
}

// parseMark parses a value and mask, such as "0x4000/0x4000".
func parseMark(text string) (value, mask uint32, err error) {
	first, second, ok := strings.Cut(text, "/")
	v, err := strconv.ParseUint(first, 0, 32)
	m := uint64(1<<32 - 1)
	if err == nil && ok {
		m, err = strconv.ParseUint(second, 0, 32)
	}
	return uint32(v), uint32(m), err
}

// Run performs a command of iptables, such as "-t nat -F OUTPUT", as another program would. The
// table is filter unless the command begins with "-t". The error says what the program would refuse.
func (t *Tables) Run(args ...string) error {
	name := "filter"
	if len(args) > 1 && args[0] == "-t" {
		name, args = args[1], args[2:]
	}
	words := slices.Clone(args)
	for i, w := range words {
		if a, err := netip.ParseAddr(w); err == nil && i > 0 && (words[i-1] == "-s" || words[i-1] == "-d") {
			words[i] = iptext.Host(a).String()
		}
		if strings.Contains(w, " ") || i > 0 && words[i-1] == "--comment" {
			words[i] = `"` + w + `"`
		}
	}
	var lines []string
	switch command := strings.Join(words, " "); {
	case (command == "-F" || command == "-X") && t.tables[name] != nil:
		for chain, c := range t.copyOf(name) {
			if command == "-F" || !c.builtin {
				lines = append(lines, command+" "+chain)
			}
		}
	default:
		lines = []string{command}
	}
	return t.apply("*"+name+"\n"+strings.Join(append(lines, "COMMIT\n"), "\n"), true, true)
}

func (t *Tables) copyOf(name string) table {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.tables[name])
}
