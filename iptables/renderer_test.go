package iptables

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/iptables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// newVendorPlane returns the data plane of a vendor's backend: a Renderer for each family, and a committer that
// fails.
func newVendorPlane(tb testing.TB, env conformance.SimEnv) conformance.Fake {
	tables := map[tracker.Family]*fake.Tables{}
	for _, f := range env.Families {
		tables[f] = fake.New()
	}
	return conformance.Fake{
		Backend: func() ruleset.Backend {
			renderers := map[tracker.Family]*Renderer{}
			for _, f := range env.Families {
				r, err := NewRenderer(Config{}, f)
				if err != nil {
					tb.Fatal(err)
				}
				renderers[f] = r
			}
			return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
				for f, r := range renderers {
					tx, err := r.Render(d)
					if err != nil {
						return err
					}
					to := tables[f]
					if d.Full {
						to = fake.New()
					}
					if err := commit(tx, to, env); err != nil {
						tx.Revert()
						return errors.Join(ruleset.ErrNeedFull, err)
					}
					tables[f] = to
				}
				return nil
			})
		},
		Handle: func(p ruleset.Packet) conformance.Outcome { return tables[tracker.FamilyOf(p.To.Addr())].Handle(p) },
		Dump: func() string {
			var b strings.Builder
			for _, f := range env.Families {
				b.WriteString(tables[f].Save())
			}
			return b.String()
		},
	}
}

// commit applies a transaction.
func commit(tx *Transaction, to *fake.Tables, env conformance.SimEnv) error {
	for _, in := range tx.Inputs(0) {
		if err := env.Fail(); err != nil {
			return err
		}
		if err := to.Restore(in.Text); err != nil {
			return err
		}
		env.Look()
	}
	return nil
}

// TestRendererWritesWhatBackendWrites applies a Renderer's text to a kernel without rules, and then the text of
// an incremental delta. The tables must equal those of a Backend.
func TestRendererWritesWhatBackendWrites(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		for name, edit := range map[string]func(*Config){
			"default": func(*Config) {}, "mark and loopback": func(c *Config) { c.MasqueradeMark, c.LocalhostNodePorts = 0x200, true },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				testRendererWrites(t, flavor, edit)
			})
		}
	})
}

func testRendererWrites(t *testing.T, flavor system, edit func(*Config)) {
	backend := newRig(t, flavor, edit, func(c *Config) { c.uncounted = true })
	empty := newRig(t, flavor, edit, func(c *Config) { c.uncounted = true })
	c, err := empty.config.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	k, err := empty.node.open(c)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	full := true
	renderers := map[tracker.Family]*Renderer{}
	cursor := backend.engine.Attach("renderer", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		if d.Full {
			d = backend.engine.Snapshot().Delta()
		}
		for _, f := range c.Families {
			if renderers[f] == nil {
				if renderers[f], err = NewRenderer(empty.config, f); err != nil {
					return err
				}
			}
			tx, err := renderers[f].Render(d)
			if err != nil {
				return err
			}
			if tx.Family() != f || tx.Empty() || full != (len(tx.Jumps()) != 0) || len(tx.Chains()) == 0 {
				t.Errorf("%s: a transaction of %v with %d chains and %d jumps", f, tx.Family(), len(tx.Chains()), len(tx.Jumps()))
			}
			p, err := k.Programs(ctx, f)
			if err != nil {
				return err
			}
			for _, in := range tx.Inputs(50) {
				if err := p.Restore(ctx, []byte(in.Text)); err != nil {
					t.Errorf("%v in\n%s", err, in.Text)
				}
			}
		}
		return nil
	}))
	check := func() {
		t.Helper()
		backend.sync()
		must.Do(t, cursor.Sync(t.Context()))
		for _, f := range c.Families {
			got, want := empty.kernel(f), backend.kernel(f)
			guard := filter.String() + " " + chainLocalnet // the Backend notes there that it set a sysctl
			want[guard] = slices.DeleteFunc(want[guard], func(rule string) bool { return rule == guardMark })
			if len(want[guard]) == 0 {
				delete(want, guard)
			}
			for name := range want {
				if strings.Join(got[name], "\n") != strings.Join(want[name], "\n") {
					t.Errorf("%v: chain %s:\n%s\nwant\n%s", f, name, strings.Join(got[name], "\n"), strings.Join(want[name], "\n"))
				}
				delete(got, name)
			}
			if len(got) != 0 {
				t.Errorf("%v: further chains: %v", f, got)
			}
		}
	}
	backend.everyKind()
	check()
	full = false
	backend.set(0, []int{2})
	backend.set(1, nil)
	check()
}

// TestTransactionsAreValues renders without a kernel.
func TestTransactionsAreValues(t *testing.T) {
	t.Parallel()
	node := newRig(t, system{NFT, true})
	node.set(0, []int{1, 2})
	r, err := NewRenderer(Config{}, tracker.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Render(&ruleset.Delta{Node: &ruleset.Node{}}); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("an incremental delta first: %v", err)
	}
	tx, err := r.Render(node.engine.Snapshot().Delta())
	if err != nil {
		t.Fatal(err)
	}
	first := tx.String()
	if again := tx.String(); again != first || !strings.HasPrefix(first, "# iptables-restore --noflush\n*filter\n") || !strings.HasSuffix(first, "COMMIT\n") {
		t.Errorf("text:\n%s", first)
	}
	tx.Revert()
	if _, err := r.Render(&ruleset.Delta{Node: &ruleset.Node{}}); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("an incremental delta after Revert: %v", err)
	}
	if _, err := NewRenderer(Config{MasqueradeMark: 3}, tracker.IPv4); !errors.Is(err, ruleset.ErrConfig) {
		t.Errorf("two bits: %v", err)
	}
}
