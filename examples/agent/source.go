package agent

import (
	"context"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/tracker"
)

// Source passes all objects to Objects, calls [Objects.Synced], and passes changes until ctx ends. It returns
// an error only if it cannot go on; the error of ctx does not count.
type Source func(ctx context.Context, to *Objects) error

// Objects receives the objects of a [Source]. Its methods are safe for concurrent use.
// The caller must not change an object afterwards. Objects ignores nil, and logs the
// first nil.
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

// SetService adds or replaces a Service.
func (o *Objects) SetService(s *v1.Service) { handIn(o, s, o.w.SetService) }

// DeleteService removes a Service.
func (o *Objects) DeleteService(n types.NamespacedName) { objects.Guarded(o.w, o.w.DeleteService)(n) }

// SetSlice adds or replaces an EndpointSlice.
func (o *Objects) SetSlice(s *discovery.EndpointSlice) { handIn(o, s, o.w.SetSlice) }

// DeleteSlice removes an EndpointSlice.
func (o *Objects) DeleteSlice(n types.NamespacedName) { objects.Guarded(o.w, o.w.DeleteSlice)(n) }

// SetNode sets this node's object. It ignores other Nodes.
func (o *Objects) SetNode(n *v1.Node) { handIn(o, n, o.w.SetNode) }

// DeleteNode removes this node's object.
func (o *Objects) DeleteNode() {
	objects.Guarded(o.w, func(struct{}) { o.w.DeleteNode() })(struct{}{})
}

// SetServiceCIDR adds or replaces a ServiceCIDR.
func (o *Objects) SetServiceCIDR(c *networking.ServiceCIDR) { handIn(o, c, o.w.SetServiceCIDR) }

// DeleteServiceCIDR removes a ServiceCIDR.
func (o *Objects) DeleteServiceCIDR(name string) { objects.Guarded(o.w, o.w.DeleteServiceCIDR)(name) }

// Synced marks the initial objects as complete. Until then the Agent changes no rule.
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
func Informers(services, slices, nodes, serviceCIDRs cache.SharedInformer) Source {
	return func(ctx context.Context, to *Objects) error {
		return to.w.Follow(ctx, nil, objects.Informers{Services: services, Slices: slices, Nodes: nodes, ServiceCIDRs: serviceCIDRs})
	}
}
