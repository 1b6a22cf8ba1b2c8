package informers

import (
	"context"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Config is the configuration of [Feed]. Tracker is required, and Client for each kind of
// object without an informer.
type Config struct {
	Client  kubernetes.Interface
	Tracker *tracker.Tracker
	// Services, Slices, Nodes and ServiceCIDRs are informers that the program has anyway, such as
	// those of a factory. Feed uses them in place of informers of its own. It neither starts nor stops them, and when it returns it removes its
	// handlers. They may hold more objects than Selector selects. Nil means an informer that
	// Feed makes and runs. Nodes is ignored if Node is empty, and ServiceCIDRs if Engine is nil.
	Services, Slices, Nodes, ServiceCIDRs cache.SharedInformer
	// Node is the name of the Node to follow. If it is empty, Feed follows no Node, and the
	// caller must mark tracker.KindNodes as synced.
	Node string
	// Engine, if not nil, gets the ranges of all ServiceCIDRs ([ruleset.Engine.SetServiceCIDRs]). An
	// API server without ServiceCIDRs (before Kubernetes 1.33), or one that forbids to read them, is
	// logged once.
	Engine *ruleset.Engine
	// NodeInfo, if not nil, returns what the tracker gets for the followed Node, and for nil after the Node
	// is deleted: for addresses that the Node does not have, for example. Its result
	// should have the Node's name. Nil means
	// [tracker.NodeInfoOf], and the name alone after a deletion.
	NodeInfo func(*v1.Node) tracker.NodeInfo
	// OnNode, if not nil, is called with the followed Node each time that it is received, and
	// with nil when it is deleted. It must not change the Node. It is for
	// health.WhyIneligible, for example.
	OnNode func(*v1.Node)
	// ReceiveService and ReceiveSlice, if not nil, are called for each Service and EndpointSlice that
	// is received or deleted. They must call update once, which passes the object to the tracker
	// and reports whether something changed. The addressType of a deleted slice may be "". The
	// methods of metrics.Set with these names fit.
	ReceiveService func(name types.NamespacedName, update func() (changed bool))
	ReceiveSlice   func(addressType string, update func() (changed bool))
	// Selector should be the Selector of the tracker's Config.
	Selector tracker.Selector
	// Resync is the interval at which the informers pass on every object again. 0 means
	// never, which is enough.
	Resync time.Duration
	// Log receives failures to read from the API server, with their cause: the first one,
	// and after that one line a minute. Nil discards them.
	Log *slog.Logger
	// Contact, if not nil, is called each time that the API server has answered Feed's own
	// informers about a resource, such as "services": with a list, the begin of a watch, or an
	// event, of which there is one a minute even without a change. Calls may be concurrent.
	Contact func(resource string)
}

// Feed passes the Services, EndpointSlices and the Node to the tracker until ctx is done,
// and returns ctx's error. It marks each source as synced. After a failure of the API
// server it retries at random intervals of up to 6 seconds.
func Feed(ctx context.Context, c Config) error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	retrier := apiretry.New(c.Log, c.Contact)
	mark := func(k tracker.Kind) func() { return func() { c.Tracker.MarkSynced(k) } }
	sources := []source{
		{informer: c.Services, handler: handler(c.Log, c.setService, c.deleteService), synced: mark(tracker.KindServices), make: func() cache.SharedInformer {
			label, field := c.Selector.ServiceListOptions()
			return informer(c, retrier, "services", &v1.Service{}, c.Client.CoreV1().RESTClient(), c.Client.CoreV1().Services(""), label, field)
		}},
		{informer: c.Slices, handler: handler(c.Log, c.setSlice, c.deleteSlice), synced: mark(tracker.KindSlices), make: func() cache.SharedInformer {
			label, field := c.Selector.SliceListOptions()
			return informer(c, retrier, "endpointslices", &discovery.EndpointSlice{}, c.Client.DiscoveryV1().RESTClient(), c.Client.DiscoveryV1().EndpointSlices(""), label, field)
		}},
	}
	if c.Node != "" {
		sources = append(sources, source{informer: c.Nodes, handler: handler(c.Log, c.setNode, c.deleteNode), synced: mark(tracker.KindNodes), make: func() cache.SharedInformer {
			field := fields.OneTermEqualSelector(metav1.ObjectNameField, c.Node).String()
			return informer(c, retrier, "nodes", &v1.Node{}, c.Client.CoreV1().RESTClient(), c.Client.CoreV1().Nodes(), "", field)
		}})
	}
	if c.Engine != nil {
		sources = append(sources, c.serviceCIDRs(retrier))
	}
	var own []func()
	var synced []cache.InformerSynced
	for _, s := range sources {
		from := s.informer
		if from == nil {
			from = s.make()
			if err := from.SetTransform(stripManagedFields); err != nil {
				return err
			}
			own = append(own, func() {
				if s.await != nil {
					s.await(ctx)
				}
				from.RunWithContext(ctx)
			})
		}
		r, err := from.AddEventHandler(s.handler)
		if err != nil {
			return err
		}
		defer from.RemoveEventHandler(r)
		synced = append(synced, r.HasSynced)
	}
	var wg sync.WaitGroup
	for _, run := range own {
		wg.Go(run)
	}
	for i, s := range sources {
		wg.Go(func() {
			if cache.WaitForCacheSync(ctx.Done(), synced[i]) {
				s.synced()
			}
		})
	}
	wg.Wait()
	<-ctx.Done() // every informer may be the caller's
	return ctx.Err()
}

// source is one kind of object.
type source struct {
	informer cache.SharedInformer // the caller's, or nil
	make     func() cache.SharedInformer
	await    func(context.Context) // delays Feed's own informer, unless it is nil
	handler  cache.ResourceEventHandler
	synced   func() // is called after the first list
}

// lister is a typed client of one resource.
type lister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// informer returns an informer of the objects that the selectors select. If the API server does not
// know the field selector, it has all objects with the labels, and the tracker ignores the others.
func informer[L runtime.Object](c Config, r *apiretry.Retrier, resource string, kind runtime.Object, client rest.Interface, from lister[L], label, field string) cache.SharedInformer {
	requests := apiretry.Requests(client, resource, label)
	if c, ok := client.(*rest.RESTClient); ok && c == nil { // of package fake
		requests = &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.LabelSelector = label
				return from.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.LabelSelector = label
				return from.Watch(ctx, o)
			},
		}
	}
	lw := r.ListWatch(resource, requests, field)
	return cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(lw, c.Client), kind,
		cache.SharedIndexInformerOptions{ResyncPeriod: c.Resync, ObjectDescription: resource})
}

// stripManagedFields removes a large field that the tracker does not read, so that the
// informers do not keep it.
func stripManagedFields(o any) (any, error) {
	if m, ok := o.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return o, nil
}
