package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptmemory"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// memory is a kernel in memory, with programs that a test can make misbehave. It outlives the
// backends that close it.
type memory struct {
	flavor Flavor
	tables map[tracker.Family]*iptmemory.Tables

	watch
	sysctls  map[string]string
	readOnly bool // no sysctl can be set
	objects  map[string]bool
}

func newMemory(flavor Flavor) *memory {
	m := &memory{
		flavor: flavor, tables: map[tracker.Family]*iptmemory.Tables{},
		sysctls: map[string]string{routeLocalnet: "0", tcpBeLiberal: "0"}, objects: map[string]bool{},
	}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		m.tables[f] = iptmemory.New()
		m.tables[f].Accounting = func(name string) bool {
			_, ok, _ := m.Packets(name)
			return ok
		}
	}
	return m
}

func (m *memory) Close() error { return nil }

func (m *memory) Sysctl(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sysctls[name]
}

func (m *memory) SetSysctl(name, value string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.readOnly {
		return errors.ErrUnsupported
	}
	m.sysctls[name] = value
	return nil
}

func (m *memory) Accounts() (accounts, error) { return m, nil }

func (m *memory) Add(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.objects[name] = true
	return nil
}

func (m *memory) Packets(name string) (uint64, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return 0, m.objects[name], nil
}

// errBusy is the error of deleting an object that a rule counts into.
var errBusy = errors.New("object is in use")

func (m *memory) Delete(name string) error {
	for _, t := range m.tables {
		var saved strings.Builder
		if err := t.Save(context.Background(), "", &saved); err != nil || strings.Contains(saved.String(), counted(name)) {
			return errors.Join(errBusy, err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, name)
	return nil
}

func (m *memory) Generation(_ context.Context, nft bool, legacy []tracker.Family) (g generation, ok bool) {
	for _, f := range legacy {
		for t := range tables {
			g.legacy += fmt.Sprint(m.tables[f].Size(t.String()), " ")
		}
	}
	if nft {
		g.nft = 1
		for _, t := range m.tables {
			g.nft += t.Commits()
		}
	}
	return g, true
}

func (m *memory) CountRules(_ context.Context, f tracker.Family, t table, chain string) (int, error) {
	return m.tables[f].Count(t.String(), chain), nil
}

func (m *memory) Watch(ctx context.Context, interval time.Duration, check func(context.Context) error, drifted func(error)) error {
	if err := dataplane.Watch(ctx, interval, check, drifted); err != nil {
		return cmp.Or(context.Cause(ctx), err) // ctx may be canceled a little later than the check notices
	}
	return nil
}

func (m *memory) Programs(_ context.Context, f tracker.Family) (programs, error) {
	return &memoryPrograms{memory: m, family: f, Tables: m.tables[f]}, nil
}

// memoryPrograms is the programs of one family.
type memoryPrograms struct {
	*iptmemory.Tables
	memory *memory
	family tracker.Family
}

func (p *memoryPrograms) NFT() bool { return p.memory.flavor == NFT }

func (p *memoryPrograms) Restore(ctx context.Context, input []byte, options ...string) error {
	how, err := p.memory.restore(p.family, input)
	killed := &CommandError{Program: "memory-restore", Status: -1, Cause: context.DeadlineExceeded}
	if how == "hang" {
		return killed
	}
	if err == nil {
		err = p.memoryError(p.Tables.Restore(ctx, input, options...))
	}
	if err == nil && how == "late" {
		return killed
	}
	return err
}

// Save fails if what is "save" and the family is IPv6.
func (p *memoryPrograms) Save(ctx context.Context, table string, out io.Writer, options ...string) error {
	p.memory.mu.Lock()
	how := p.memory.how
	p.memory.mu.Unlock()
	if how == "missing" || how == "save6" && p.family == tracker.IPv6 {
		return &CommandError{Program: "memory-save", Status: 1}
	}
	if how == "hide" {
		return &CommandError{Program: "memory-save", Cause: iptool.ErrUnreadable}
	}
	return p.memoryError(p.Tables.Save(ctx, table, out, options...))
}

// hide makes iptables-save unable to print the tables.
func (m *memory) hide() (show func()) {
	m.set("hide", "")
	return func() { m.set("", "") }
}

// ReadContents does not know which chain hides the others.
func (p *memoryPrograms) ReadContents(ctx context.Context, table string) (c iptool.Contents, err error) {
	var saved strings.Builder
	err = p.Tables.Save(ctx, table, &saved)
	iptext.Scan(strings.NewReader(saved.String()), func(l iptext.Line) {
		if !l.IsRule {
			c.Chains = append(c.Chains, string(l.Chain))
		} else if to := iptext.Target(l.Rule); slices.Contains(c.Chains, to) {
			c.Jumps = append(c.Jumps, iptool.Jump{From: string(l.Chain), To: to})
		}
	})
	return c, err
}

// memoryError returns err with a [*CommandError] in place of an [*iptool.Error].
func (*memoryPrograms) memoryError(err error) error {
	if e, ok := err.(*iptool.Error); ok {
		return (*CommandError)(e)
	}
	return err
}

// command implements testNode.
func (m *memory) command(f tracker.Family, suffix string, args ...string) (string, error) {
	t := m.tables[f]
	switch suffix {
	case "-save":
		table := ""
		if len(args) == 2 && args[0] == "-t" {
			table = args[1]
		}
		var out strings.Builder
		err := t.Save(context.Background(), table, &out)
		return out.String(), err
	case "-restore":
		text, err := os.ReadFile(args[len(args)-1])
		if err != nil {
			return "", err
		}
		if len(args) == 2 {
			return "", t.Restore(context.Background(), text)
		}
		return "", t.Load(string(text))
	}
	return "", t.Run(args...)
}

func (m *memory) open(Config) (kernel, error)         { return m, nil }
func (m *memory) sysctl(name string) string           { return m.Sysctl(name) }
func (m *memory) setSysctl(name, value string) error  { return m.SetSysctl(name, value) }
func (m *memory) timeout(time.Duration)               {}
func (m *memory) dump(f tracker.Family) (text string) { text, _ = m.command(f, "-save"); return text }

// lines returns the sorted contents of a family's tables, without the canaries.
func (m *memory) lines(f tracker.Family) (out []string) {
	for table, chains := range iptext.Parse(m.dump(f)) {
		for name, rules := range chains {
			if name == chainCanary {
				continue
			}
			out = append(out, fmt.Sprint(table, " ", name))
			for i, r := range rules {
				out = append(out, fmt.Sprint(table, " ", name, " ", i, " ", r))
			}
		}
	}
	slices.Sort(out)
	return out
}
