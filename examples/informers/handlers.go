package informers

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/tracker"
)

// handler returns a handler that calls set with new and changed objects, and gone with deleted ones:
// their name and, unless only a tombstone is left, their last state. It logs the first object of another type, which
// an informer of the program may have.
func handler[T any](log *slog.Logger, set func(T), gone func(name types.NamespacedName, last T)) cache.ResourceEventHandler {
	var once sync.Once
	pass := func(o any) {
		v, ok := o.(T)
		if ok {
			set(v)
			return
		}
		once.Do(func() {
			log.Warn("ignored the objects of an informer: they have another type", "type", fmt.Sprintf("%T", o), "want", fmt.Sprintf("%T", v))
		})
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    pass,
		UpdateFunc: func(_, o any) { pass(o) },
		DeleteFunc: func(o any) {
			if n, err := cache.DeletionHandlingObjectToName(o); err == nil {
				last, _ := o.(T)
				gone(types.NamespacedName{Namespace: n.Namespace, Name: n.Name}, last)
			}
		},
	}
}

func (c Config) setService(s *v1.Service) {
	c.receiveService(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, func() bool { return c.Tracker.SetService(s) })
}

func (c Config) deleteService(name types.NamespacedName, _ *v1.Service) {
	c.receiveService(name, func() bool { return c.Tracker.DeleteService(name) })
}

func (c Config) receiveService(name types.NamespacedName, update func() bool) {
	if c.ReceiveService == nil {
		update()
		return
	}
	c.ReceiveService(name, update)
}

func (c Config) setSlice(s *discovery.EndpointSlice) {
	c.receiveSlice(s, func() bool { return c.Tracker.SetSlice(s) })
}

func (c Config) deleteSlice(name types.NamespacedName, last *discovery.EndpointSlice) {
	c.receiveSlice(last, func() bool { return c.Tracker.DeleteSlice(name) })
}

func (c Config) receiveSlice(s *discovery.EndpointSlice, update func() bool) {
	if c.ReceiveSlice == nil {
		update()
		return
	}
	addressType := ""
	if s != nil {
		addressType = string(s.AddressType)
	}
	c.ReceiveSlice(addressType, update)
}

// setNode passes the followed Node on and ignores other Nodes.
func (c Config) setNode(n *v1.Node) {
	if n.Name != c.Node {
		return
	}
	c.passNode(n)
}

// deleteNode passes on that the followed Node is deleted.
func (c Config) deleteNode(name types.NamespacedName, _ *v1.Node) {
	if name.Name != c.Node {
		return
	}
	c.passNode(nil)
}

func (c Config) passNode(n *v1.Node) {
	info := tracker.NodeInfo{Name: c.Node}
	switch {
	case c.NodeInfo != nil:
		info = c.NodeInfo(n)
	case n != nil:
		info = tracker.NodeInfoOf(n)
	}
	c.Tracker.SetNode(info)
	if c.OnNode != nil {
		c.OnNode(n)
	}
}

// serviceCIDRs returns the source of ServiceCIDRs, whose ranges it passes to the Engine together. The
// tracker does not wait for it, because the API server may not have any.
func (c Config) serviceCIDRs(r *apiretry.Retrier) source {
	var mu sync.Mutex
	ranges := map[string][]netip.Prefix{}
	change := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		f()
		c.Engine.SetServiceCIDRs(slices.Concat(slices.Collect(maps.Values(ranges))...), nil)
	}
	return source{
		informer: c.ServiceCIDRs,
		handler: handler(c.Log,
			func(o *networking.ServiceCIDR) { change(func() { ranges[o.Name] = apiretry.Ranges(o, c.Log) }) },
			func(n types.NamespacedName, _ *networking.ServiceCIDR) { change(func() { delete(ranges, n.Name) }) },
		),
		await: func(ctx context.Context) {
			apiretry.ReadableCIDRs(ctx, c.Log, func(ctx context.Context) error {
				_, err := c.Client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{Limit: 1})
				return err
			}, func() {})
		},
		make: func() cache.SharedInformer {
			return informer(c, r, "servicecidrs", &networking.ServiceCIDR{}, c.Client.NetworkingV1().RESTClient(), c.Client.NetworkingV1().ServiceCIDRs(), "", "")
		},
		synced: func() {},
	}
}
