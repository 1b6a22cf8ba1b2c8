package agent

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/tracker"
)

// Source hands in all objects, calls [Objects.Synced], and hands in changes until ctx ends. It returns
// an error only if it cannot go on; the error of ctx does not count.
type Source func(ctx context.Context, to *Objects) error

// Objects receives the objects of a [Source]. Its methods are safe for concurrent use. Objects that
// it received must not be changed. It ignores nil, and logs the first.
type Objects struct {
	w   *objects.World
	nil sync.Once
}

// handIn calls f with an object that is not nil.
func handIn[T any](to *Objects, o *T, f func(*T)) {
	if o == nil {
		to.nil.Do(func() {
			to.w.Log.Warn("ignored an object of the Source that is nil; further ones are ignored silently", "want", fmt.Sprintf("%T", o))
		})
		return
	}
	objects.Guarded(to.w, f)(o)
}

// SetService hands in a new or changed Service.
func (o *Objects) SetService(s *v1.Service) { handIn(o, s, o.w.SetService) }

// DeleteService is for a Service that is gone.
func (o *Objects) DeleteService(n types.NamespacedName) { objects.Guarded(o.w, o.w.DeleteService)(n) }

// SetSlice hands in a new or changed EndpointSlice.
func (o *Objects) SetSlice(s *discovery.EndpointSlice) { handIn(o, s, o.w.SetSlice) }

// DeleteSlice is for an EndpointSlice that is gone.
func (o *Objects) DeleteSlice(n types.NamespacedName) { objects.Guarded(o.w, o.w.DeleteSlice)(n) }

// SetNode hands in this node's object. Other Nodes are ignored.
func (o *Objects) SetNode(n *v1.Node) { handIn(o, n, o.w.SetNode) }

// DeleteNode is for this node's object if it is gone.
func (o *Objects) DeleteNode() {
	objects.Guarded(o.w, func(struct{}) { o.w.DeleteNode() })(struct{}{})
}

// SetServiceCIDR hands in a new or changed ServiceCIDR.
func (o *Objects) SetServiceCIDR(c *networking.ServiceCIDR) { handIn(o, c, o.w.SetServiceCIDR) }

// DeleteServiceCIDR is for a ServiceCIDR that is gone.
func (o *Objects) DeleteServiceCIDR(name string) { objects.Guarded(o.w, o.w.DeleteServiceCIDR)(name) }

// Synced reports that all objects that exist at the start were handed in. Before, no rule changes.
func (o *Objects) Synced() {
	o.w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// source is a Source as the agent uses it.
type source struct {
	follow Source
	node   *v1.Node
}

func (s *source) Node(_ context.Context, need objects.Need) (*v1.Node, error) {
	if need == nil {
		return s.node, nil
	}
	if s.node == nil {
		return nil, configError{fmt.Errorf("Options.Node is required by this configuration with a Source")}
	}
	if err := need(s.node); err != nil {
		return nil, configError{err}
	}
	return s.node, nil
}

func (s *source) Follow(ctx context.Context, w *objects.World) error {
	return s.follow(ctx, &Objects{w: w})
}

func (s *source) Close() {}

// Informers returns a Source of informers that the program runs anyway: of Services, EndpointSlices and
// Nodes, and of ServiceCIDRs, which may be nil. The Source neither starts nor stops them, and removes
// its handlers. They may have more objects than the agent needs.
func Informers(services, slices, nodes, serviceCIDRs cache.SharedInformer, nodeName string) Source {
	return func(ctx context.Context, to *Objects) error {
		g, left := apiretry.NewGroup(ctx, apiretry.New(to.w.Log, nil)), &atomic.Int32{}
		left.Store(1) // informers that have not synced, and this function
		synced := func() {
			if left.Add(-1) == 0 {
				to.Synced()
			}
		}
		follow(g, services, left, synced, to.SetService, to.DeleteService)
		follow(g, slices, left, synced, to.SetSlice, to.DeleteSlice)
		follow(g, nodes, left, synced, to.SetNode, func(n types.NamespacedName) {
			if n.Name == nodeName {
				to.DeleteNode()
			}
		})
		follow(g, serviceCIDRs, left, synced, to.SetServiceCIDR, func(n types.NamespacedName) { to.DeleteServiceCIDR(n.Name) })
		synced()
		return g.Wait()
	}
}

// follow follows an informer, unless it is nil.
func follow[T metav1.Object](g *apiretry.Group, informer cache.SharedInformer, left *atomic.Int32, synced func(), set func(T), gone func(types.NamespacedName)) {
	if informer != nil {
		left.Add(1)
		apiretry.Follow(g, apiretry.Source[T]{Informer: informer, Set: set, Gone: func(n types.NamespacedName, _ T) { gone(n) }, Synced: synced})
	}
}
