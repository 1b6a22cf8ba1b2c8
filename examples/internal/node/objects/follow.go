package objects

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/tracker"
)

// Informers are informers that the program runs anyway.
type Informers struct{ Services, Slices, Nodes, ServiceCIDRs cache.SharedInformer }

// Follow hands in the objects of the informers, and those without an informer from the API server, until ctx ends. A nil
// client has no objects.
func (w *World) Follow(ctx context.Context, client *kubeapi.Client, in Informers) error {
	if client == nil {
		client = &kubeapi.Client{}
	}
	g := apiretry.NewGroup(ctx, w.Log)
	g.Contact, g.Failed = w.Contact, w.NotRead
	var left atomic.Int32
	left.Store(4)
	synced := func(kinds ...tracker.Kind) func() {
		return func() {
			if !w.Keep {
				w.Tracker.MarkSynced(kinds...)
			} else if left.Add(-1) == 0 { // a command shows the world once, so it waits for the ServiceCIDRs, too
				w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
			}
		}
	}
	label, field := tracker.Selector{}.ServiceListOptions()
	sliceLabel, sliceField := tracker.Selector{}.SliceListOptions()
	if w.Keep { // a command shows why the proxy leaves an object out
		label, field, sliceLabel, sliceField = "", "", "", ""
	}
	follow(w, g, client.Core, label, "there is no Service, not even that of the API server: is this the right API server?", apiretry.Source[*v1.Service]{
		Resource: "services", Informer: in.Services, Field: field,
		Set: w.SetService, Gone: w.DeleteService, Synced: synced(tracker.KindServices),
	})
	follow(w, g, client.Discovery, sliceLabel, "there is no EndpointSlice, not even that of the API server: all Services refuse connections", apiretry.Source[*discovery.EndpointSlice]{
		Resource: "endpointslices", Informer: in.Slices, Field: sliceField,
		Set: w.SetSlice, Gone: w.DeleteSlice, Synced: synced(tracker.KindSlices),
	})
	noNode := fmt.Sprintf("there is no Node named %q, a name from %s: endpoints on this node are not known as local, and /healthz answers 503",
		w.Config.NodeName, w.Config.NodeNameFrom)
	listedNode := synced(tracker.KindNodes)
	follow(w, g, client.Core, "", noNode, apiretry.Source[*v1.Node]{
		Resource: "nodes", Informer: in.Nodes, Name: w.Config.NodeName,
		Set: w.SetNode, Gone: func(types.NamespacedName) { w.DeleteNode() }, Synced: func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.node == nil {
				w.Ineligible(noNode)
			}
			listedNode()
		},
	})
	listed := sync.OnceFunc(synced())
	follow(w, g, client.Networking, "", "", apiretry.Source[*networking.ServiceCIDR]{
		Resource: "servicecidrs", Informer: in.ServiceCIDRs,
		Set: w.SetServiceCIDR, Gone: func(n types.NamespacedName) { w.DeleteServiceCIDR(n.Name) }, Synced: listed, Absent: listed,
	})
	return g.Wait()
}

// follow follows a source: its informer, or the objects of a client with a label. empty describes the problem if there is no
// object, and is "" if a cluster needs none.
func follow[T metav1.Object](w *World, g *apiretry.Group, client rest.Interface, label, empty string, s apiretry.Source[T]) {
	if s.Informer == nil && client == nil {
		s.Synced()
		return
	}
	s.Requests = func() (*cache.ListWatch, any) { return apiretry.Requests(client, s.Resource, label), client }
	seen := make(chan struct{})
	see := sync.OnceFunc(func() { close(seen) })
	set, synced := s.Set, s.Synced
	s.Set = Guarded(w, func(o T) { see(); set(o) })
	s.Gone = Guarded(w, s.Gone)
	s.Synced = sync.OnceFunc(func() {
		w.Log.Debug("listed", "resource", s.Resource)
		if empty != "" {
			g.Go(func() error { w.warnEmpty(g.Context, s.Resource, empty, seen); return nil })
		}
		synced()
	})
	apiretry.Follow(g, s)
}

const (
	// firstEmpty is the time until the first warning about a resource without objects, and longestEmpty the longest
	// between two.
	firstEmpty   = 5 * time.Second
	longestEmpty = 10 * time.Minute
)

// warnEmpty warns, less and less often, while the API server has listed a resource completely, but without an object
// that every node needs: its own Node, and the Service of the API server. A wrong node name is the most frequent mistake
// of operators, and nothing else tells of it.
func (w *World) warnEmpty(ctx context.Context, resource, problem string, seen <-chan struct{}) {
	for wait, warned := firstEmpty, false; ; wait, warned = min(2*wait, longestEmpty), true {
		select {
		case <-ctx.Done():
			return
		case <-seen:
			if warned {
				w.Log.Info("the API server has an object now", "resource", resource)
			}
			return
		case <-time.After(wait):
			w.Log.Warn("the API server has listed no object of a resource", "resource", resource, "problem", problem)
		}
	}
}

// Guarded returns f as a function that hands a panic to w: client-go's goroutines call it.
func Guarded[T any](w *World, f func(T)) func(T) {
	return func(o T) {
		if w.Panicked != nil {
			defer func() {
				if p := recover(); p != nil {
					w.Panicked(p)
				}
			}()
		}
		f(o)
	}
}
