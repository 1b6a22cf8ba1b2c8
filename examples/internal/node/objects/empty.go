package objects

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-proxier/proxier/examples/kubeapi"
)

// emptyInterval is the time until the first warning about a source without objects.
const emptyInterval = 5 * time.Second

// emptySources warns while the API server has listed a resource completely, but without an object
// that every node needs: its own Node, and the Service of the API server. A wrong node name is the
// most frequent mistake of operators, and nothing else tells of it.
type emptySources struct {
	w   *World
	why map[kubeapi.Source]string

	mu sync.Mutex
	// has holds the sources that have an object, and empty those that are listed and have none, with
	// the number of intervals since then.
	has   map[kubeapi.Source]bool
	empty map[kubeapi.Source]int
}

func newEmptySources(w *World) *emptySources {
	return &emptySources{
		w: w, has: map[kubeapi.Source]bool{}, empty: map[kubeapi.Source]int{},
		why: map[kubeapi.Source]string{
			kubeapi.Nodes: fmt.Sprintf("there is no Node named %q, a name from %s: endpoints on this node are not known as local, and /healthz answers 503",
				w.Config.NodeName, w.Config.NodeNameFrom),
			kubeapi.Services: "there is no Service, not even that of the API server: is this the right API server?",
			kubeapi.Slices:   "there is no EndpointSlice, not even that of the API server: all Services refuse connections",
		},
	}
}

// seen records that a source has an object.
func (e *emptySources) seen(s kubeapi.Source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.has[s] = true
	if _, ok := e.empty[s]; ok {
		delete(e.empty, s)
		e.w.Log.Info("the API server has an object now", "resource", string(s))
	}
}

// listed records that all objects of a source were handed in.
func (e *emptySources) listed(s kubeapi.Source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.why[s] != "" && !e.has[s] {
		e.empty[s] = 0
		if s == kubeapi.Nodes {
			e.w.Ineligible(e.why[s])
		}
	}
}

// warn writes lines about each source without an object until ctx ends, less and less often.
func (e *emptySources) warn(ctx context.Context) {
	tick := time.NewTicker(emptyInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		e.mu.Lock()
		for s, n := range e.empty {
			n++
			e.empty[s] = n
			if n&(n-1) == 0 || n%128 == 0 {
				e.w.Log.Warn("the API server has listed no object of a resource", "resource", string(s), "problem", e.why[s])
			}
		}
		e.mu.Unlock()
	}
}
