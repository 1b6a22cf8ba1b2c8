package ruleset

import (
	"errors"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

func TestByFamilySplitsDeltas(t *testing.T) {
	k4, k6 := key("a", tracker.IPv4), key("a", tracker.IPv6)
	node := &Node{}
	delta := func(full bool, old *Node, keys ...tracker.Key) *Delta {
		d := &Delta{Full: full, Node: node, OldNode: old}
		for _, k := range keys {
			d.Changes = append(d.Changes, Change{Key: k, New: &Service{Key: k}})
		}
		return d
	}
	boom, bang := errors.New("boom"), errors.New("bang")
	partial4 := &PartialError{Failed: map[tracker.Key]error{k4: bang}}
	type outcome int
	const (
		fine outcome = iota
		some         // a PartialError
		all          // another error
		full         // ErrNeedFull
	)
	for _, c := range []struct {
		name     string
		d        *Delta
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
		{"one fails of a full delta", delta(true, node, k4, k6), nil, boom, 1, 1, all, nil, boom},
		{"one fails with a new node", delta(false, nil, k4), nil, boom, 1, 0, all, nil, boom},
		{"one needs all", delta(false, node, k4, k6), ErrNeedFull, nil, 1, 1, full, nil, nil},
		{"one needs all, one fails", delta(false, node, k4, k6), ErrNeedFull, boom, 1, 1, full, nil, nil},
		{"one needs all, one fails in part", delta(false, node, k4, k6), partial4, ErrNeedFull, 1, 1, full, nil, nil},
	} {
		b4 := &recorder{answer: func(*Delta) error { return c.e4 }}
		b6 := &recorder{answer: func(*Delta) error { return c.e6 }}
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
		var p *PartialError
		got := fine
		switch {
		case errors.Is(err, ErrNeedFull):
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

// TestPartialErrorText checks that the text names the first few Services.
func TestPartialErrorText(t *testing.T) {
	e := &PartialError{Failed: map[tracker.Key]error{}}
	for _, s := range []string{"d", "c", "b", "a"} {
		e.Failed[key(s, tracker.IPv4)] = errInjected
	}
	want := "4 services failed; default/a:p/TCP/IPv4: injected failure; default/b:p/TCP/IPv4: injected failure; default/c:p/TCP/IPv4: injected failure; ..."
	if got := e.Error(); got != want {
		t.Errorf("got %q", got)
	}
}
