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
	w  *World
	mu sync.Mutex
	of map[kubeapi.Source]*emptySource
}

// emptySource is a resource of which every cluster has an object.
type emptySource struct {
	problem     string
	listed, has bool
	// intervals is the number of intervals since it was listed without an object.
	intervals int
}

func newEmptySources(w *World) *emptySources {
	return &emptySources{w: w, of: map[kubeapi.Source]*emptySource{
		kubeapi.Nodes: {problem: fmt.Sprintf("there is no Node named %q, a name from %s: endpoints on this node are not known as local, and /healthz answers 503",
			w.Config.NodeName, w.Config.NodeNameFrom)},
		kubeapi.Services: {problem: "there is no Service, not even that of the API server: is this the right API server?"},
		kubeapi.Slices:   {problem: "there is no EndpointSlice, not even that of the API server: all Services refuse connections"},
	}}
}

// seen records that a source has an object.
func (e *emptySources) seen(s kubeapi.Source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.of[s]; x.listed && !x.has {
		e.w.Log.Info("the API server has an object now", "resource", string(s))
	}
	e.of[s].has = true
}

// listed records that all objects of a source were handed in.
func (e *emptySources) listed(s kubeapi.Source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.of[s]
	if x == nil { // clusters before 1.33 have no ServiceCIDR
		return
	}
	x.listed = true
	if s == kubeapi.Nodes && !x.has {
		e.w.Ineligible(x.problem)
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
		for s, x := range e.of {
			if !x.listed || x.has {
				continue
			}
			if x.intervals++; x.intervals&(x.intervals-1) == 0 || x.intervals%128 == 0 {
				e.w.Log.Warn("the API server has listed no object of a resource", "resource", string(s), "problem", x.problem)
			}
		}
		e.mu.Unlock()
	}
}
