package holdings

import (
	"maps"
	"runtime"
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

func TestHeapFollowsAllocations(t *testing.T) {
	before := Heap()
	b := make([]byte, 1<<20)
	// The collection may free other objects.
	if grown := Heap() - before; grown < 1<<20-1<<16 || grown > 2<<20 {
		t.Errorf("a megabyte takes %d bytes", grown)
	}
	runtime.KeepAlive(b)
	if left := Heap() - before; left > 1<<19 {
		t.Errorf("%d bytes are left", left)
	}
}
