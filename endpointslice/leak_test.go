package endpointslice_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"

	discovery "k8s.io/api/discovery/v1"
)

// heap returns the heap in use after a garbage collection.
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
// times, a few at a time. The cache must then use about as much memory as one that
// was filled once.
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
	t.Logf("%d bytes an endpoint after gradual change, %d in one change", gradual/services/endpoints, atOnce/services/endpoints)
	if gradual > atOnce+atOnce/3 {
		t.Errorf("%d bytes after gradual change, %d in one change", gradual, atOnce)
	}
}

// TestDeletedSlicesAreFreed adds and removes slices whose names, nodes and addresses
// are used once. There are more of them than the cache's tables of shared names hold.
func TestDeletedSlicesAreFreed(t *testing.T) {
	const cycles, each = 1024, 48 // a multiple of the table size, because tables are dropped as a whole
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
