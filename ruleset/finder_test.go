package ruleset

import (
	"slices"
	"testing"
)

// TestFinderFindsFirst compares the two ways of searching, for long and for short lists.
func TestFinderFindsFirst(t *testing.T) {
	for n := range 40 {
		list := make([]int, n)
		for i := range list {
			list[i] = i * i % 23 // with duplicates
		}
		f := newFinder(list, func(x int) int { return x })
		for k := range 25 {
			if got, want := f.first(k), slices.Index(list, k); got != want || f.has(k) != (want >= 0) {
				t.Errorf("%d elements: %d is at %d, want %d", n, k, got, want)
			}
		}
	}
}
