package model

import (
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// someTx returns a transaction and a mark in it.
func someTx() (*Tx, Mark) {
	tx := &Tx{}
	var mark Mark
	for i := range 40 {
		if i == 25 {
			mark = tx.Mark()
		}
		if i%10 == 0 {
			tx.Object(Object{Kind: NewSet, Family: tracker.IPv4, Set: layout.Allowed(i), Size: i})
		}
		e := layout.Element{Set: layout.Set(i % 5), Key: word(uint32(i)), Data: word(7)}
		if i%3 == 0 {
			tx.remove(tracker.IPv6, &e)
		} else {
			tx.add(tracker.IPv6, &e, "comment")
		}
		tx.Lost = append(tx.Lost, Destination{tracker.IPv4, word(uint32(i))})
	}
	return tx, mark
}

func TestCutDividesTransaction(t *testing.T) {
	tx, mark := someTx()
	whole, size := *tx, tx.Size()
	var rest Tx
	rest.Object(Object{Kind: DeleteTable})
	tx.Cut(mark, &rest)
	if n := len(tx.Edits); n != 25 || len(rest.Edits) != 15 || len(tx.Objects) != 3 || len(rest.Objects) != 1 || len(rest.Lost) != 15 {
		t.Errorf("parts of %d and %d elements, %d and %d objects", n, len(rest.Edits), len(tx.Objects), len(rest.Objects))
	}
	if tx.Size()+rest.Size() < size {
		t.Errorf("the parts take %d and %d bytes, the whole %d", tx.Size(), rest.Size(), size)
	}
	tx.append(&rest)
	if got, want := tx.String(), whole.String(); got != want || tx.Size() != size {
		t.Errorf("joined again, the parts take %d bytes of %d:\n%s", tx.Size(), size, got)
	}
}

func TestOnlyStructureIsStructural(t *testing.T) {
	for s, want := range map[layout.Set]bool{layout.Endpoints: false, layout.ServiceIPs: false, layout.NodePortIPs: true, layout.StickyHandlers: true} {
		tx := &Tx{}
		tx.add(tracker.IPv4, &layout.Element{Set: s, Key: word(1)}, "")
		if tx.Structural() != want {
			t.Errorf("an element of %s is structural: %v", s.Name(), !want)
		}
	}
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestTouchingRangesAreMerged(t *testing.T) {
	got := merged(prefixes("10.0.1.0/24", "10.0.0.0/24", "10.0.0.128/25", "192.168.7.7/16"))
	want := []Range{{netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.0.1.255")}, {netip.MustParseAddr("192.168.0.0"), netip.MustParseAddr("192.168.255.255")}}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("ranges %v, want %v", got, want)
	}
}

func TestNodePortRangesLeaveOutLoopback(t *testing.T) {
	for _, n := range []ruleset.NodePorts{{All: true}, {Prefixes: prefixes("0.0.0.0/0", "::/0")}} {
		for f, loopback := range map[tracker.Family]string{tracker.IPv4: "127.3.4.5", tracker.IPv6: "::1"} {
			for _, r := range nodePortRanges(n, f) {
				if a := netip.MustParseAddr(loopback); !a.Less(r.First) && !r.Last.Less(a) {
					t.Errorf("%s is in %v", a, r)
				}
			}
		}
	}
}

func TestBoundsOfRangesAreReadBack(t *testing.T) {
	want := merged(prefixes("10.0.0.0/8", "11.0.0.0/8", "200.0.0.0/5", "240.0.0.0/4"))
	var bounds []Bound
	for _, r := range want {
		tx := &Tx{}
		r.edit(tracker.IPv4, layout.NodePortIPs, false, tx)
		tx.Edits[0].Each(func(e nft.Element) {
			a, _ := netip.AddrFromSlice(e.Key)
			bounds = append([]Bound{{a, e.IntervalEnd}}, bounds...)
		})
	}
	got := RangesOf(bounds)
	if len(got) != len(want) {
		t.Fatalf("ranges %v, want %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("range %v, want %v", got[i], want[i])
		}
	}
}
