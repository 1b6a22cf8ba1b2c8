package objects

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-proxier/proxier/examples/kubeapi"
)

// The first warning about a source without objects comes after emptyFirst. The pauses double up to
// emptyLongest.
const (
	emptyFirst   = 5 * time.Second
	emptyLongest = 10 * time.Minute
)

// emptySources warns while the API server has listed a resource completely, but without an object
// that every node needs: its own Node, and the Service of the API server. A wrong node name is the
// most frequent mistake of operators, and nothing else tells of it.
type emptySources struct {
	log  *slog.Logger
	why  map[kubeapi.Source]string
	node func(reason string)

	mu sync.Mutex
	// empty holds the sources that are listed and have no object, with why that is wrong.
	empty map[kubeapi.Source]string
	has   map[kubeapi.Source]bool
	// added lets warn begin with the first pause again.
	added chan struct{}
}

func newEmptySources(w *World) *emptySources {
	return &emptySources{
		log: w.Log, node: w.setIneligible,
		why: map[kubeapi.Source]string{
			kubeapi.Nodes: fmt.Sprintf("there is no Node named %q, a name from %s: endpoints on this node are not known as local, and /healthz answers 503",
				w.Config.NodeName, w.Config.NodeNameFrom),
			kubeapi.Services: "there is no Service, not even that of the API server: is this the right API server?",
			kubeapi.Slices:   "there is no EndpointSlice, not even that of the API server: all Services refuse connections",
		},
		empty: map[kubeapi.Source]string{}, has: map[kubeapi.Source]bool{}, added: make(chan struct{}, 1),
	}
}

// seen records that a source has an object.
func (e *emptySources) seen(s kubeapi.Source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.has[s] {
		return
	}
	e.has[s] = true
	if _, warned := e.empty[s]; warned {
		delete(e.empty, s)
		e.log.Info("the API server has an object now", "resource", string(s))
	}
}

// listed records that all objects of a source were handed in.
func (e *emptySources) listed(s kubeapi.Source) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if why := e.why[s]; why != "" && !e.has[s] {
		e.empty[s] = why
		select {
		case e.added <- struct{}{}:
		default:
		}
		if s == kubeapi.Nodes {
			e.node(why)
		}
	}
}

// warn writes a line for each source without an object until ctx ends.
func (e *emptySources) warn(ctx context.Context) {
	for pause := emptyFirst; ; pause = min(2*pause, emptyLongest) {
		select {
		case <-ctx.Done():
			return
		case <-e.added:
			pause = emptyFirst / 2
			continue
		case <-time.After(pause):
		}
		e.mu.Lock()
		for s, why := range e.empty {
			e.log.Warn("the API server has listed no object of a resource", "resource", string(s), "problem", why)
		}
		e.mu.Unlock()
	}
}
