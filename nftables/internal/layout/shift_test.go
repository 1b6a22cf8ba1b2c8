package layout

import (
	"math/rand/v2"
	"testing"
)

// TestShiftsReachTheirTarget applies what the kernel computes to every port of ranges.
func TestShiftsReachTheirTarget(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name                string
		first, last, target uint16
		want                bool
	}{
		{"up", 10000, 20000, 30000, true},
		{"up by one", 1, 65534, 2, true},
		{"down", 20000, 30000, 10000, true},
		{"down by one", 30000, 30100, 29999, true},
		{"to the last port", 1000, 1999, 64536, true},
		{"to the first port", 50001, 50100, 1, true},
		{"down, more ports than lie below", 2, 65535, 1, false},
		{"down, from an odd port", 40001, 40099, 39990, true},
	}
	for _, tt := range tests {
		from, to, ok := ShiftedBy(tt.first, tt.last, tt.target)
		if ok != tt.want {
			t.Errorf("%s: found %t, want %t", tt.name, ok, tt.want)
		}
		if ok {
			checkShift(t, tt.first, tt.last, tt.target, from, to)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	down, found := 0, 0
	for range 2000 {
		n := 1 + r.IntN(1<<(1+r.IntN(14)))
		first, target := uint16(1+r.IntN(65536-n)), uint16(1+r.IntN(65536-n))
		last := first + uint16(n-1)
		from, to, ok := ShiftedBy(first, last, target)
		if target >= first && !ok {
			t.Errorf("no translation shifts %d-%d up to %d", first, last, target)
		}
		if target < first {
			down++
		}
		if ok {
			if target < first {
				found++
			}
			checkShift(t, first, last, target, from, to)
		}
	}
	t.Logf("%d of %d shifts downwards are possible", found, down)
	if found < down*9/10 {
		t.Errorf("only %d of %d shifts downwards are possible", found, down)
	}
}

func checkShift(t *testing.T, first, last, target, from, to uint16) {
	t.Helper()
	for i := 0; i <= int(last-first); i++ {
		if got, want := Shifted(from, to, first+uint16(i)), target+uint16(i); got != want || got < from || got > to {
			t.Fatalf("%d-%d to %d: port %d is shifted to %d by %d-%d, want %d", first, last, target, int(first)+i, got, from, to, want)
		}
	}
}
