package fairshare

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func client(n byte) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, n}) }

// prefixed returns an address of 2001:db8::/48 in the /56 and /64 with the numbers.
func prefixed(n56, n64, n int) netip.Addr {
	return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 6: byte(n56), byte(n64), 14: byte(n >> 8), byte(n)})
}

// TestFloodEndsItsOwnEntries fills a table by one holder of each kind, while another has few entries.
func TestFloodEndsItsOwnEntries(t *testing.T) {
	for what, flood := range map[string]func(i int) Holder{
		"namespace with many Services": func(i int) Holder { return Holder{"b", string(rune('a' + i%9)), client(1)} },
		"namespace with many clients":  func(i int) Holder { return Holder{"b", "s", client(byte(i))} },
		"Service with many clients":    func(i int) Holder { return Holder{"a", "t", client(byte(i))} },
		"client":                       func(int) Holder { return Holder{"a", "s", client(2)} },
		"client at a mapped address":   func(int) Holder { return Holder{"a", "s", netip.AddrFrom16(client(2).As16())} },
		"client with an IPv6 /64":      func(i int) Holder { return Holder{"a", "s", prefixed(0, 0, i)} },
		"client with an IPv6 /56":      func(i int) Holder { return Holder{"a", "s", prefixed(0, i%256, i)} },
		"client with an IPv6 /48":      func(i int) Holder { return Holder{"a", "s", prefixed(i%256, i/256, i)} },
		"neighbor in the IPv6 /64":     func(int) Holder { return Holder{"a", "s", prefixed(9, 9, 2)} },
	} {
		table, victim := New[int](100), Holder{"a", "s", client(1)}
		if strings.HasPrefix(what, "neighbor") {
			victim.Client = prefixed(9, 9, 1)
		}
		for i := range 3 {
			table.Add(-1-i, victim)
		}
		last := -1
		for i := range 1000 {
			v, full := table.Add(i, flood(i))
			if full != (i >= 97) || full && v <= last {
				t.Fatalf("%s: the victim of entry %d is %d, %t", what, i, v, full)
			}
			if full {
				last = v
			}
		}
		if table.Len() != 100 || !table.Remove(-1) {
			t.Errorf("%s: %d entries", what, table.Len())
		}
	}
}

// TestUnusedEntriesEndFirst adds one entry of each holder.
func TestUnusedEntriesEndFirst(t *testing.T) {
	table := New[int](3)
	for i := range 3 {
		table.Add(i, Holder{Client: client(byte(i))})
	}
	table.Use(0, false)
	if v, full := table.Add(3, Holder{Client: client(3)}); !full || v != 1 {
		t.Errorf("the victim is %d", v)
	}
	if table.Use(1, true) || table.Remove(1) {
		t.Error("the table has the victim")
	}
}

// TestIdleEntriesEndBeforeBusyOnes never ends the new entry.
func TestIdleEntriesEndBeforeBusyOnes(t *testing.T) {
	table := New[int](2)
	table.Add(0, Holder{})
	table.Add(1, Holder{})
	table.Use(0, true)
	if v, _ := table.Add(2, Holder{}); v != 1 {
		t.Errorf("the victim is %d, want the idle one", v)
	}
	table.Use(2, true)
	if v, _ := table.Add(3, Holder{}); v != 0 {
		t.Errorf("the victim is %d, want the one that was busy first", v)
	}
}

// TestTableAgreesWithModel compares a table with a slow search, in random runs.
func TestTableAgreesWithModel(t *testing.T) {
	type entry struct {
		id, used int
		busy     bool
		holder   Holder
	}
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 0))
		table, most := New[int](20), 20
		var model []entry
		now := 0
		for id := range 2000 {
			now++
			switch i := r.IntN(len(model) + 1); {
			case i < len(model) && r.IntN(3) == 0:
				model[i].used, model[i].busy = now, r.IntN(2) == 0
				table.Use(model[i].id, model[i].busy)
			case i < len(model) && r.IntN(4) == 0:
				table.Remove(model[i].id)
				model = slices.Delete(model, i, i+1)
			default:
				h := Holder{string(rune('a' + r.IntN(3))), string(rune('a' + r.IntN(3))), client(byte(r.IntN(3)))}
				if r.IntN(2) == 0 {
					h.Client = prefixed(r.IntN(2), r.IntN(2), r.IntN(2))
				}
				got, full := table.Add(id, h)
				model = append(model, entry{id: id, used: now, holder: h})
				if full != (len(model) > most) {
					t.Fatalf("seed %d: full is %t with %d entries", seed, full, len(model))
				}
				if !full {
					continue
				}
				// The victim's namespace has most, its Service has most of them, and so on.
				count := func(same func(a, b Holder) bool, h Holder) (n int) {
					for _, e := range model {
						if same(e.holder, h) {
							n++
						}
					}
					return n
				}
				at := slices.IndexFunc(model, func(e entry) bool { return e.id == got })
				v := model[at].holder
				same := []func(a, b Holder) bool{
					func(a, b Holder) bool { return a.Namespace == b.Namespace },
					func(a, b Holder) bool { return a.Namespace == b.Namespace && a.Service == b.Service },
				}
				for _, bits := range []int{48, 56, 64, 128} {
					same = append(same, func(a, b Holder) bool {
						p, _ := a.Client.Prefix(min(bits, a.Client.BitLen()))
						return same[1](a, b) && p.Contains(b.Client)
					})
				}
				for _, e := range model {
					for level, same := range same {
						if count(same, e.holder) > count(same, v) {
							t.Fatalf("seed %d: the victim's holder is %v, and %v has more at level %d", seed, v, e.holder, level)
						}
						if !same(e.holder, v) {
							break
						}
					}
				}
				own := slices.DeleteFunc(slices.Clone(model), func(e entry) bool { return e.holder != v || e.id == id })
				slices.SortFunc(own, func(a, b entry) int {
					if a.busy != b.busy {
						return map[bool]int{false: -1, true: 1}[a.busy]
					}
					return cmp.Compare(a.used, b.used)
				})
				if own[0].id != got {
					t.Fatalf("seed %d: the victim is %d, want %d", seed, got, own[0].id)
				}
				model = slices.Delete(model, at, at+1)
			}
		}
		for _, e := range model {
			table.Remove(e.id)
		}
		if table.Len() != 0 || len(table.root.children) != 0 || len(table.root.ranks) != 0 || table.root.highest != 0 {
			t.Fatalf("seed %d: %+v is left", seed, table.root)
		}
	}
}

func BenchmarkFlood(b *testing.B) {
	for name, client := range map[string]func(i int) netip.Addr{
		"IPv4":      func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) },
		"IPv6 /64s": func(i int) netip.Addr { return prefixed(i>>8, i, i) },
	} {
		b.Run(name, func(b *testing.B) {
			table := New[int](20000)
			b.ReportAllocs()
			for i := range b.N {
				table.Add(i, Holder{"b", "s", client(i)})
			}
		})
	}
}
