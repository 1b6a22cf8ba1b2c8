package dataplane

import (
	"context"
	"errors"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestByFamilySplitsDeltas(t *testing.T) {
	k4, k6 := key("a", tracker.IPv4), key("a", tracker.IPv6)
	node := &ruleset.Node{}
	delta := func(full bool, old *ruleset.Node, keys ...tracker.Key) *ruleset.Delta {
		d := &ruleset.Delta{Full: full, Node: node, OldNode: old}
		for _, k := range keys {
			d.Changes = append(d.Changes, ruleset.Change{Key: k, New: &ruleset.Port{Key: k}})
		}
		return d
	}
	boom, bang := errors.New("boom"), errors.New("bang")
	partial4 := &ruleset.PartialError{Failed: map[tracker.Key]error{k4: bang}}
	type outcome int
	const (
		fine outcome = iota
		some         // a PartialError
		all          // another error
		full         // ErrNeedFull
	)
	for _, c := range []struct {
		name     string
		d        *ruleset.Delta
		e4, e6   error
		n4, n6   int // changes for each, -1 if not called
		want     outcome
		failed   []tracker.Key
		contains error
	}{
		{"both fine", delta(false, node, k4, k6), nil, nil, 1, 1, fine, nil, nil},
		{"one has nothing", delta(false, node, k4), nil, boom, 1, -1, fine, nil, nil},
		{"new node", delta(false, nil, k4), nil, nil, 1, 0, fine, nil, nil},
		{"full", delta(true, node), nil, nil, 0, 0, fine, nil, nil},
		{"one fails", delta(false, node, k4, k6), nil, boom, 1, 1, some, []tracker.Key{k6}, boom},
		{"one in part, one altogether", delta(false, node, k4, k6), partial4, boom, 1, 1, some, []tracker.Key{k4, k6}, boom},
		{"one in part", delta(true, nil, k4, k6), partial4, nil, 1, 1, some, []tracker.Key{k4}, bang},
		{"one fails of a full delta", delta(true, node, k4, k6), nil, boom, 1, 1, full, nil, boom},
		{"one fails with a new node", delta(false, nil, k4), nil, boom, 1, 0, full, nil, boom},
		{"one needs all", delta(false, node, k4, k6), ruleset.ErrNeedFull, nil, 1, 1, full, nil, nil},
		{"one needs all, one fails", delta(false, node, k4, k6), ruleset.ErrNeedFull, boom, 1, 1, full, nil, nil},
		{"one needs all, one fails in part", delta(false, node, k4, k6), partial4, ruleset.ErrNeedFull, 1, 1, full, nil, nil},
	} {
		b4 := &recorder{answer: func(*ruleset.Delta) error { return c.e4 }}
		b6 := &recorder{answer: func(*ruleset.Delta) error { return c.e6 }}
		err := ByFamily(b4, b6).Apply(t.Context(), c.d)
		for f, x := range map[tracker.Family]struct {
			got  *recorder
			want int
		}{tracker.IPv4: {b4, c.n4}, tracker.IPv6: {b6, c.n6}} {
			n := -1
			if len(x.got.deltas) == 1 {
				d := x.got.deltas[0]
				n = len(d.Changes)
				for _, ch := range d.Changes {
					if ch.Key.Family != f {
						t.Errorf("%s: %s passed to %s", c.name, ch.Key, f)
					}
				}
				if d.Node != c.d.Node || d.Full != c.d.Full {
					t.Errorf("%s: %s got another delta", c.name, f)
				}
			}
			if n != x.want {
				t.Errorf("%s: %s got %d changes, want %d", c.name, f, n, x.want)
			}
		}
		var p *ruleset.PartialError
		got := fine
		switch {
		case errors.Is(err, ruleset.ErrNeedFull):
			got = full
		case errors.As(err, &p):
			got = some
		case err != nil:
			got = all
		}
		if got != c.want || c.contains != nil && !errors.Is(err, c.contains) {
			t.Errorf("%s: error %v", c.name, err)
		}
		if got == some {
			for _, k := range c.failed {
				if p.Failed[k] == nil {
					t.Errorf("%s: %s has not failed", c.name, k)
				}
			}
			if len(p.Failed) != len(c.failed) {
				t.Errorf("%s: failed %v", c.name, p.Failed)
			}
		}
	}
	// A family without a backend is not served, and this is not an error.
	b4 := &recorder{}
	if err := ByFamily(b4, nil).Apply(t.Context(), delta(false, node, k4, k6)); err != nil || len(b4.deltas[0].Changes) != 1 {
		t.Errorf("without IPv6: %v", err)
	}
	if err := ByFamily(nil, nil).Apply(t.Context(), delta(true, node, k4, k6)); err != nil {
		t.Errorf("without any: %v", err)
	}
}

// recorder is a backend that keeps the deltas it gets.
type recorder struct {
	deltas []*ruleset.Delta
	answer func(*ruleset.Delta) error
}

func (r *recorder) Apply(_ context.Context, d *ruleset.Delta) error {
	r.deltas = append(r.deltas, d)
	if r.answer != nil {
		return r.answer(d)
	}
	return nil
}

func key(name string, f tracker.Family) tracker.Key {
	k := tracker.Key{Family: f}
	k.Namespace, k.Name, k.Port, k.Protocol = "default", name, "p", v1.ProtocolTCP
	return k
}
