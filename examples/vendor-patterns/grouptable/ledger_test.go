package grouptable

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestLedger holds a Ledger against a set of pairs.
func TestLedger(t *testing.T) {
	type pair struct{ owner, item int }
	r := rand.New(rand.NewPCG(1, 1))
	var l Ledger[int, int]
	model := map[pair]bool{}
	users := func(item int) (n int) {
		for p := range model {
			if p.item == item {
				n++
			}
		}
		return n
	}
	for range 20000 {
		p := pair{r.IntN(5), r.IntN(7)}
		had, before := model[p], users(p.item)
		if r.IntN(2) == 0 {
			model[p] = true
			if got, want := l.Claim(p.owner, p.item), !had && before == 0; got != want {
				t.Fatalf("claim %v of %v: first %t", p, model, got)
			}
		} else {
			delete(model, p)
			if got, want := l.Release(p.owner, p.item), had && before == 1; got != want {
				t.Fatalf("release %v of %v: last %t", p, model, got)
			}
		}
		if l.Used(p.item) != (users(p.item) > 0) {
			t.Fatalf("used %d: %t", p.item, l.Used(p.item))
		}
		var want []int
		for q := range model {
			if q.owner == p.owner {
				want = append(want, q.item)
			}
		}
		slices.Sort(want)
		if got := slices.Sorted(l.Items(p.owner)); !slices.Equal(got, want) {
			t.Fatalf("items of %d: %v, want %v", p.owner, got, want)
		}
	}
	for p := range maps.Clone(model) {
		l.Release(p.owner, p.item)
	}
	if len(l.users) != 0 || len(l.items) != 0 {
		t.Errorf("it remembers %v and %v", l.users, l.items)
	}
}

func ExampleLedger() {
	var l Ledger[string, string]
	fmt.Println(l.Claim("web", "10.0.0.1"), l.Claim("api", "10.0.0.1"), l.Claim("api", "10.0.0.1"))
	fmt.Println(l.Release("web", "10.0.0.1"), l.Release("api", "10.0.0.1"), l.Release("api", "10.0.0.1"))
	// Output:
	// true false false
	// false true false
}
