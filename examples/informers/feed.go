package informers

import (
	"context"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	// Services, Slices, Nodes and ServiceCIDRs are informers that the program has anyway, such as a factory's.
	// Feed uses them in place of requests with Client. It neither starts nor stops them, and when it returns it
	// removes its handlers. They may hold more objects than Selector selects. Nodes is ignored if Node is
	// empty and OnNode nil, and ServiceCIDRs if Engine is nil.
	Services, Slices, Nodes, ServiceCIDRs cache.SharedInformer
	// Node is the name of the Node to follow. If it is empty, Feed follows all Nodes for OnNode, and passes none to
	// the tracker. Without both, it follows no Node, and the caller must mark tracker.KindNodes as synced.
	Node string
	// Engine, if not nil, gets the ranges of all ServiceCIDRs
	// ([ruleset.Engine.SetServiceCIDRs]). Feed logs once that the API server has no
	// ServiceCIDRs (before Kubernetes 1.33) or forbids reading them.
	Engine *ruleset.Engine
	// NodeInfo, if not nil, returns the tracker's information about the followed Node,
	// for example with addresses that the Node lacks. Its argument is nil after the Node
	// is deleted. Its result should have the Node's name. Nil means [tracker.NodeInfoOf],
	// and the name alone after a deletion.
	NodeInfo func(*v1.Node) tracker.NodeInfo
	// OnNode, if not nil, is called with a followed Node and its name each time that it is received, and
	// with nil when it is deleted. It must not change the Node. It is for
	// health.WhyIneligible or package placement, for example.
	OnNode func(name string, n *v1.Node)
	// ReceiveService and ReceiveSlice, if not nil, are called for each Service and EndpointSlice that
	// is received or deleted. They must call update once, which passes the object to the tracker
	// and reports whether something changed. The addressType of a deleted slice is "". The
	// methods of metrics.Set with these names fit.
	ReceiveService func(name types.NamespacedName, update func() (changed bool))
	ReceiveSlice   func(addressType string, update func() (changed bool))
	// Selector should be the Selector of the tracker's Config.
	Selector tracker.Selector
	// Log receives failures to read from the API server, with their cause: the first one,
	// and after that one line a minute. Nil discards them.
	Log *slog.Logger
	// Contact, if not nil, is called each time that the API server has answered Feed about a resource, such as
	// "services": with a list, the start of a watch, or an event. Even without a change there is an event a
	// minute. Calls may be concurrent.
	Contact func(resource string)
}

// Feed passes the Services, EndpointSlices and the Node to the tracker until ctx is done,
// and returns ctx's error. It marks each source as synced. After a failure of the API
// server it retries at random intervals of up to 6 seconds.
func Feed(ctx context.Context, c Config) error {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.ReceiveService == nil {
		c.ReceiveService = func(_ types.NamespacedName, update func() bool) { update() }
	}
	if c.ReceiveSlice == nil {
		c.ReceiveSlice = func(_ string, update func() bool) { update() }
	}
	g := apiretry.NewGroup(ctx, c.Log)
	g.Contact = c.Contact
	mark := func(k tracker.Kind) func() { return func() { c.Tracker.MarkSynced(k) } }
	label, field := c.Selector.ServiceListOptions()
	follow(g, c, c.Services, apiretry.Source[*v1.Service]{Resource: "services", Field: field, Set: c.setService, Gone: c.deleteService, Synced: mark(tracker.KindServices)}, label,
		func() (rest.Interface, lister[*v1.ServiceList]) {
			return c.Client.CoreV1().RESTClient(), c.Client.CoreV1().Services("")
		})
	label, field = c.Selector.SliceListOptions()
	follow(g, c, c.Slices, apiretry.Source[*discovery.EndpointSlice]{Resource: "endpointslices", Field: field, Set: c.setSlice, Gone: c.deleteSlice, Synced: mark(tracker.KindSlices)}, label,
		func() (rest.Interface, lister[*discovery.EndpointSliceList]) {
			return c.Client.DiscoveryV1().RESTClient(), c.Client.DiscoveryV1().EndpointSlices("")
		})
	if c.Node != "" || c.OnNode != nil {
		follow(g, c, c.Nodes, apiretry.Source[*v1.Node]{
			Resource: "nodes", Name: c.Node, Synced: mark(tracker.KindNodes),
			Set:  func(n *v1.Node) { c.passNode(n.Name, n) },
			Gone: func(n types.NamespacedName) { c.passNode(n.Name, nil) },
		}, "", func() (rest.Interface, lister[*v1.NodeList]) {
			return c.Client.CoreV1().RESTClient(), c.Client.CoreV1().Nodes()
		})
	}
	if c.Engine != nil {
		follow(g, c, c.ServiceCIDRs, c.serviceCIDRs(), "", func() (rest.Interface, lister[*networking.ServiceCIDRList]) {
			return c.Client.NetworkingV1().RESTClient(), c.Client.NetworkingV1().ServiceCIDRs()
		})
	}
	return g.Wait()
}

// lister is a typed client of one resource.
type lister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// follow follows a source: an informer of the program or, if that is nil, the objects with the labels
// that a client lists.
func follow[T metav1.Object, L runtime.Object](g *apiretry.Group, c Config, informer cache.SharedInformer, s apiretry.Source[T], label string, client func() (rest.Interface, lister[L])) {
	s.Informer = informer
	s.Requests = func() (*cache.ListWatch, any) {
		client, typed := client()
		if r, ok := client.(*rest.RESTClient); !ok || r != nil {
			return apiretry.Requests(client, s.Resource, label), client
		}
		return &cache.ListWatch{ // of package fake
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.LabelSelector = label
				return typed.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.LabelSelector = label
				return typed.Watch(ctx, o)
			},
		}, c.Client
	}
	apiretry.Follow(g, s)
}
