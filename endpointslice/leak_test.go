package endpointslice_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"

	discovery "k8s.io/api/discovery/v1"
)

// heap is what is in use after a collection.
func heap() int {
	for range 2 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

func numbered(n int) string {
	return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}).String()
}

// TestGradualChangeKeepsNoMemory replaces all endpoints of large slices several
// times over, a few at a time: what the cache then takes is about what one takes
// that was given the result at once.
func TestGradualChangeKeepsNoMemory(t *testing.T) {
	const services, endpoints, each = 50, 100, 7
	rng := rand.New(rand.NewPCG(4, 4))
	state := make([][]int, services)
	next := 0
	for i := range state {
		for range endpoints {
			state[i] = append(state[i], next)
			next++
		}
	}
	hand := func(c *cache, i int) {
		var eps []discovery.Endpoint
		for _, n := range state[i] {
			eps = append(eps, ep(numbered(n)))
		}
		c.Set(slice(fmt.Sprint("slice-", i), fmt.Sprint("svc-", i), eps...))
	}
	empty := heap()
	c, _ := newCache()
	for i := range state {
		hand(c, i)
	}
	c.Take()
	for range 5 * endpoints / each {
		for i := range state {
			for range each {
				state[i][rng.IntN(endpoints)] = next
				next++
			}
			hand(c, i)
		}
		c.Take()
	}
	gradual := heap() - empty
	runtime.KeepAlive(c)
	c, _ = newCache()
	for i := range state {
		hand(c, i)
	}
	c.Take()
	atOnce := heap() - empty
	runtime.KeepAlive(c)
	t.Logf("%d bytes an endpoint after gradual change, %d at once", gradual/services/endpoints, atOnce/services/endpoints)
	if gradual > atOnce+atOnce/3 {
		t.Errorf("%d bytes after gradual change, %d at once", gradual, atOnce)
	}
}

// TestNothingIsLeft adds and removes slices with names, nodes and addresses that
// never come back: more of them than the cache remembers to share their memory.
func TestNothingIsLeft(t *testing.T) {
	const cycles, each = 1024, 48 // a multiple of what is remembered, which comes and goes as a whole
	c, _ := newCache()
	cycle := func(n int) {
		for i := range each {
			id := n*each + i
			c.Set(slice(fmt.Sprint("slice-", id), fmt.Sprint("svc-", id), onNode(ep(numbered(id)), fmt.Sprint("node-", id)), onNode(ep(numbered(id+1)), fmt.Sprint("node-", id+1))))
		}
		c.Take()
		for i := range each {
			c.Delete(named(fmt.Sprint("slice-", n*each+i)))
		}
		c.Take()
	}
	for n := range cycles {
		cycle(n)
	}
	before := heap()
	for n := range cycles {
		cycle(cycles + n)
	}
	after := heap()
	runtime.KeepAlive(c)
	if after > before+100<<10 {
		t.Errorf("after %d slices the heap has grown from %d to %d bytes", cycles*each, before, after)
	}
}
