package driver_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset/driver"
)

// TestLedgerRequestsEveryWrite performs random operations on a ledger, a set of
// claims and a data plane. Writes fail, with or without effect. The test makes only
// the writes that the ledger requests, so the data plane shows whether these suffice.
func TestLedgerRequestsEveryWrite(t *testing.T) {
	type claim struct{ owner, item int }
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 1))
		l, claims, plane := &driver.Ledger[int, int]{}, map[claim]bool{}, map[int]bool{}
		users := func(item int) (n int) {
			for c := range claims {
				if c.item == item {
					n++
				}
			}
			return n
		}
		// write changes the data plane and reports whether the caller sees a success.
		write := func(item int, have bool) bool {
			failed := r.IntN(4) == 0
			if !failed || r.IntN(2) == 0 {
				plane[item] = have
			}
			return !failed
		}
		install := func(item int) {
			if write(item, true) {
				l.Installed(item)
			}
		}
		for range 400 {
			c := claim{r.IntN(4), r.IntN(6)}
			switch r.IntN(10) {
			case 0, 1, 2, 3:
				claims[c] = true
				if l.Claim(c.owner, c.item) {
					install(c.item)
				} else if !plane[c.item] {
					t.Fatalf("seed %d: %d is missing and not requested", seed, c.item)
				}
			case 4, 5, 6, 7:
				had, others := claims[c], users(c.item)
				delete(claims, c)
				remove := l.Release(c.owner, c.item)
				if want := had && others == 1; remove != want {
					t.Fatalf("release %v: %t, want %t", c, remove, want)
				}
				if remove && write(c.item, false) {
					l.Removed(c.item)
				} else if remove && r.IntN(2) == 0 { // undo
					claims[c] = true
					if !l.Claim(c.owner, c.item) {
						t.Fatalf("claim %v after a failed removal does not request an install", c)
					}
					install(c.item)
				}
			case 8: // another program removes it, and the caller notices
				plane[c.item] = false
				l.Removed(c.item)
			case 9: // a new process
				l = &driver.Ledger[int, int]{}
				for item, have := range plane {
					if have {
						l.Installed(item)
					}
				}
				for c := range claims {
					if l.Claim(c.owner, c.item) {
						install(c.item)
					}
				}
			}
			if got, want := l.Users(c.item), users(c.item); got != want {
				t.Fatalf("users of %d: %d, want %d", c.item, got, want)
			}
			var want []int
			for q := range claims {
				if q.owner == c.owner {
					want = append(want, q.item)
				}
			}
			slices.Sort(want)
			if got := slices.Sorted(l.Items(c.owner)); !slices.Equal(got, want) {
				t.Fatalf("items of %d: %v, want %v", c.owner, got, want)
			}
			// The ledger lists unused items in the data plane.
			unused := maps.Collect(func(yield func(int, bool) bool) {
				for i := range l.Unused() {
					if !yield(i, true) {
						return
					}
				}
			})
			has := slices.Collect(l.All())
			for item := range 6 {
				if l.Has(item) != slices.Contains(has, item) || l.Has(item) && users(item) != 0 && !plane[item] || unused[item] && !l.Has(item) {
					t.Fatalf("seed %d: Has(%d) is %t, All yields %v, the plane has it: %t", seed, item, l.Has(item), has, plane[item])
				}
			}
			for item, have := range plane {
				if have && users(item) == 0 && !unused[item] {
					t.Fatalf("seed %d: %d is unused and not listed", seed, item)
				}
				if unused[item] && users(item) != 0 {
					t.Fatalf("seed %d: %d is in use", seed, item)
				}
			}
		}
		// In the end a caller can complete all writes.
		for c := range claims {
			if l.Claim(c.owner, c.item) {
				plane[c.item] = true
				l.Installed(c.item)
			}
		}
		for item := range l.Unused() {
			delete(plane, item)
			l.Removed(item)
		}
		for item := range 6 {
			if plane[item] != (users(item) > 0) {
				t.Errorf("seed %d: item %d with %d users is installed: %t", seed, item, users(item), plane[item])
			}
		}
		if n := len(slices.Collect(l.Unused())); n != 0 {
			t.Errorf("%d unused items after all were removed", n)
		}
	}
}

// Two Services share an endpoint, and one install of it fails.
func ExampleLedger() {
	var l driver.Ledger[string, string]
	fmt.Println("web needs it installed:", l.Claim("web", "10.0.0.1:80")) // the install fails
	fmt.Println("api needs it installed:", l.Claim("api", "10.0.0.1:80"))
	l.Installed("10.0.0.1:80")
	fmt.Println("web needs it installed:", l.Claim("web", "10.0.0.1:80"))
	fmt.Println("without web it must be removed:", l.Release("web", "10.0.0.1:80"))
	fmt.Println("without api it must be removed:", l.Release("api", "10.0.0.1:80"))
	l.Removed("10.0.0.1:80")
	// Output:
	// web needs it installed: true
	// api needs it installed: true
	// web needs it installed: false
	// without web it must be removed: false
	// without api it must be removed: true
}
