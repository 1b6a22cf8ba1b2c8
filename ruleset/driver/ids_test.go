package driver_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset/driver"
)

// TestAllocatorMatchesMaps performs random operations on allocators and maps. New
// processes adopt the IDs.
func TestAllocatorMatchesMaps(t *testing.T) {
	const low, high, keys = 3, 12, 14
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 5))
		a, err := driver.NewIDs[int](low, high)
		if err != nil {
			t.Fatal(err)
		}
		model, reserved := map[int]uint32{}, map[uint32]bool{}
		used := func(id uint32) bool {
			for _, u := range model {
				if u == id {
					return true
				}
			}
			return reserved[id]
		}
		taken := func() (n int) {
			for id := uint32(low); id <= high; id++ {
				if used(id) {
					n++
				}
			}
			return n
		}
		for range 300 {
			k, id := r.IntN(keys), uint32(r.IntN(high+3))
			switch r.IntN(12) {
			case 0, 1, 2, 3, 4, 5:
				had, ok := model[k]
				free := high - low + 1 - taken()
				got, err := a.Get(k)
				switch {
				case ok:
					if err != nil || got != had {
						t.Fatalf("get %d: %d, %v, want %d", k, got, err, had)
					}
				case free == 0:
					if err == nil {
						t.Fatalf("get %d without free IDs: %d, %v", k, got, err)
					}
				case err != nil || got < low || got > high || used(got):
					t.Fatalf("get %d: %d, %v; in use are %v and %v", k, got, err, model, reserved)
				default:
					model[k] = got
				}
			case 6, 7, 8:
				a.Release(k)
				delete(model, k)
			case 9:
				a.Reserve(id)
				reserved[id] = true
			case 10:
				for id := range reserved {
					a.Unreserve(id)
				}
				clear(reserved)
			case 11: // a new process, without reservations
				if a, err = driver.NewIDs[int](low, high); err != nil {
					t.Fatal(err)
				}
				clear(reserved)
				for k, id := range model {
					must.Do(t, a.Adopt(k, id))
				}
			}
			had, ok := model[k]
			if got, found := a.Lookup(k); got != had || found != ok {
				t.Fatalf("lookup of %d: %d, %t, want %d, %t", k, got, found, had, ok)
			}
			if got, found := a.Key(had); ok && (got != k || !found) {
				t.Fatalf("key of %d: %d, %t, want %d", had, got, found, k)
			}
		}
	}
}

func TestAdoptRejectsConflicts(t *testing.T) {
	a, err := driver.NewIDs[string](1, 10)
	if err != nil {
		t.Fatal(err)
	}
	must.Do(t, errors.Join(a.Adopt("a", 5), a.Adopt("a", 5)))
	a.Reserve(6)
	for _, c := range []struct {
		key string
		id  uint32
	}{{"a", 7}, {"b", 5}, {"b", 6}, {"b", 0}, {"b", 11}} {
		if err := a.Adopt(c.key, c.id); err == nil {
			t.Errorf("%s is adopted as %d", c.key, c.id)
		}
	}
	if a5, _ := a.Lookup("a"); a5 != 5 {
		t.Errorf("after conflicts, a has %d", a5)
	}
	if id, ok := a.Lookup("b"); ok {
		t.Errorf("after conflicts, b has %d", id)
	}
	if _, err := driver.NewIDs[string](2, 1); err == nil {
		t.Error("an empty range is accepted")
	}
}

// TestLongestUnusedIDIsReused checks that released IDs are allocated in the order of
// their release, and that the last number of the whole range can be allocated.
func TestLongestUnusedIDIsReused(t *testing.T) {
	a, err := driver.NewIDs[int](1<<32-3, 1<<32-1)
	if err != nil {
		t.Fatal(err)
	}
	get := func(k int) uint32 {
		t.Helper()
		id, err := a.Get(k)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	one, two, _ := get(1), get(2), get(3)
	if id, err := a.Get(4); err == nil {
		t.Errorf("the fourth of three is %d", id)
	}
	a.Release(2)
	a.Release(1)
	if got := get(4); got != two {
		t.Errorf("got %d, want %d, which was released first", got, two)
	}
	if got := get(5); got != one {
		t.Errorf("got %d, want %d", got, one)
	}
}
