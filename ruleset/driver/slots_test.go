package driver_test

import (
	"errors"
	"iter"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

var errSlot = errors.New("write failed")

// array is a data plane with the entries of a pool and a stored size.
type array struct {
	t       *testing.T
	entries map[int]int
	size    int
	fails   func() bool
	half    func() bool // whether a failed write takes effect
	calls   int
}

// look checks that a packet finds an entry in every slot below the size.
func (a *array) look() {
	a.t.Helper()
	for i := range a.size {
		if _, ok := a.entries[i]; !ok {
			a.t.Errorf("slot %d of %d is empty", i, a.size)
		}
	}
}

func (a *array) do(f func()) error {
	a.calls++
	if a.fails() {
		if a.half() {
			f()
			a.look()
		}
		return errSlot
	}
	f()
	a.look()
	return nil
}

// slots returns the Slots of a new process. The value of an endpoint is its address modulo mod.
func (a *array) slots(batch bool, mod int) *driver.Slots[driver.Pool, int] {
	t := driver.Table[driver.Slot[driver.Pool], int]{
		Installed: func() (iter.Seq2[driver.Slot[driver.Pool], int], error) {
			return func(yield func(driver.Slot[driver.Pool], int) bool) {
				for n, v := range a.entries {
					if !yield(driver.Slot[driver.Pool]{N: n}, v) {
						return
					}
				}
			}, nil
		},
		Put:    func(at driver.Slot[driver.Pool], v int) error { return a.do(func() { a.entries[at.N] = v }) },
		Delete: func(at driver.Slot[driver.Pool]) error { return a.do(func() { delete(a.entries, at.N) }) },
	}
	if batch {
		t.Put, t.Delete = nil, nil
		t.PutAll = func(keys []driver.Slot[driver.Pool], values []int) error {
			return a.do(func() {
				for i, at := range keys {
					a.entries[at.N] = values[i]
				}
			})
		}
		t.DeleteAll = func(keys []driver.Slot[driver.Pool]) error {
			return a.do(func() {
				for _, at := range keys {
					delete(a.entries, at.N)
				}
			})
		}
	}
	return &driver.Slots[driver.Pool, int]{
		Entries:  t,
		Value:    func(_ driver.Pool, ep *tracker.Endpoint) int { return int(ep.Addr.Port()) % mod },
		ByWeight: mod == 1000,
	}
}

func (a *array) sync(s *driver.Slots[driver.Pool, int], eps []*tracker.Endpoint) error {
	t := s.Pools()
	if err := t.Put(driver.Pool{}, eps); err != nil {
		return err
	}
	if err := a.do(func() { a.size = s.Len(driver.Pool{}) }); err != nil {
		return err
	}
	return t.Trim(driver.Pool{})
}

func endpoint(port, weight int) *tracker.Endpoint {
	return &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(port)), Weight: uint16(weight)}
}

// TestSlotsAgreeWithThePool performs random changes of a pool, by single writes and batches, whose
// endpoints may have equal values or several slots. Writes fail, with or without effect, and new
// processes adopt the entries.
func TestSlotsAgreeWithThePool(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		failing, batch, mod := true, seed%2 == 0, []int{3, 100, 1000}[seed%3]
		a := &array{
			t: t, entries: map[int]int{},
			fails: func() bool { return failing && r.IntN(5) == 0 },
			half:  func() bool { return r.IntN(2) == 0 },
		}
		s, eps := a.slots(batch, mod), []*tracker.Endpoint{}
		for step := range 80 {
			for range r.IntN(5) {
				at := r.IntN(8)
				eps = slices.DeleteFunc(eps, func(ep *tracker.Endpoint) bool { return int(ep.Addr.Port()) == at })
				if r.IntN(5) > 1 {
					eps = append(eps, endpoint(at, 1+r.IntN(3)))
				}
			}
			if r.IntN(8) == 0 { // a new process, or a resync
				if r.IntN(2) == 0 {
					s = a.slots(batch, mod)
				}
				if _, err := s.Pools().Installed(); err != nil {
					t.Fatal(err)
				}
			}
			if step%8 == 7 {
				failing = false
			}
			if err := a.sync(s, eps); err != nil && !errors.Is(err, errSlot) {
				t.Fatal(err)
			}
			if !failing {
				want := map[int]int{}
				n := 0
				for i, k := range ruleset.Shares(eps) {
					if mod != 1000 {
						k = 1
					}
					want[int(eps[i].Addr.Port())%mod] += k
					n += k
				}
				got := map[int]int{}
				for _, v := range a.entries {
					got[v]++
				}
				all := map[int]int{}
				for at, v := range s.All() {
					all[at.N] = v
				}
				if !maps.Equal(got, want) || !maps.Equal(all, a.entries) || a.size != n || len(a.entries) != n {
					t.Errorf("size %d, entries %v, want %v", a.size, a.entries, want)
				}
				a.calls = 0
				if err := a.sync(s, eps); err != nil || a.calls != 1 {
					t.Errorf("%d calls without a change, and error %v", a.calls, err)
				}
			}
			if failing = true; t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
		}
	}
}

// TestWritesAreProportionalToChanges counts the writes. An endpoint that replaces another
// one costs one write.
func TestWritesAreProportionalToChanges(t *testing.T) {
	a := &array{t: t, entries: map[int]int{}, fails: func() bool { return false }}
	s := a.slots(false, 10000)
	pool := map[int]bool{}
	expect := func(what string, writes int) {
		t.Helper()
		a.calls = -1 // the size
		var eps []*tracker.Endpoint
		for _, port := range slices.Sorted(maps.Keys(pool)) {
			eps = append(eps, endpoint(port, 1))
		}
		if err := a.sync(s, eps); err != nil {
			t.Fatal(err)
		}
		if a.calls != writes {
			t.Errorf("%s: %d writes, want %d", what, a.calls, writes)
		}
	}
	for i := range 100 {
		pool[i] = true
	}
	expect("100 endpoints", 100)
	expect("nothing", 0)
	delete(pool, 7)
	pool[1000] = true
	expect("an endpoint in place of another", 1)
	delete(pool, 50)
	expect("one endpoint deleted", 2) // the last one moves to its slot, and the last slot is deleted
	delete(pool, 98)
	delete(pool, 1000)
	expect("two endpoints deleted", 3) // one of them was the last
	s = a.slots(false, 10000)
	if _, err := s.Pools().Installed(); err != nil {
		t.Fatal(err)
	}
	expect("a new process", 0)
	s.Entries.Installed = nil
	if _, err := s.Pools().Installed(); err != nil {
		t.Fatal(err)
	}
	expect("a data plane that cannot be read", 97)
}
