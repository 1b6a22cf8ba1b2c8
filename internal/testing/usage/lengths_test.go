package usage

import (
	"maps"
	"testing"
)

type node struct {
	next  *node
	names map[string][]int
	fixed [2][]byte
	f     func()
}

func TestLengthsOfEverythingReachable(t *testing.T) {
	a := &node{names: map[string][]int{"a": {1, 2}, "b": {3}}, fixed: [2][]byte{{1}, nil}, f: func() {}}
	a.next = &node{next: a, names: map[string][]int{}}
	want := map[string]int{
		".names": 2, ".names[]": 3, ".fixed[]": 1,
		".next.names": 0, ".next.fixed[]": 0,
	}
	if got := Lengths(a); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
