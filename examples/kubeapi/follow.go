package kubeapi

import (
	"context"
	"log/slog"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/tracker"
)

// Source is a kind of object that [Follow] follows.
type Source string

// The sources. Their values are the names of API resources.
const (
	Services     Source = "services"
	Slices       Source = "endpointslices"
	Nodes        Source = "nodes"
	ServiceCIDRs Source = "servicecidrs"
)

// Handler receives new and changed objects, and the names of deleted ones. [Follow] calls
// the functions of one kind one at a time, and functions of different kinds concurrently. The
// functions must not modify an object, and may keep it after the call only if it is a Node.
// Every field but All, Contact and Failed must be set.
type Handler struct {
	// All makes Follow include Services and EndpointSlices that the selector excludes, for
	// programs that show why a proxy leaves them out.
	All               bool
	SetService        func(*v1.Service)
	DeleteService     func(types.NamespacedName)
	SetSlice          func(*discovery.EndpointSlice)
	DeleteSlice       func(types.NamespacedName)
	SetNode           func(*v1.Node)
	DeleteNode        func()
	SetServiceCIDR    func(*networking.ServiceCIDR)
	DeleteServiceCIDR func(name string)
	// Synced is called once for each source, after all objects of the first list were
	// passed to the other functions. For ServiceCIDRs it is also called when the API server
	// does not have them or forbids reading them.
	Synced func(Source)
	// Contact is called each time that the API server has answered about a source: with a list,
	// the start of a watch, or an event. Even without a change there is an event a minute, so the
	// last call limits the age of the objects. Calls may be concurrent.
	Contact func(Source)
	// Failed is called each time that a request about a source fails, or has no answer yet. Follow goes on. Calls
	// may be concurrent.
	Failed func(Source, error)
}

// Follow passes all objects to the handler, and then every change, until ctx ends. It
// follows the Services and EndpointSlices that a proxy with the selector serves, the
// ServiceCIDRs, and the Node of the given name. It returns soon after ctx ends, and
// leaves behind only goroutines that end their requests.
//
// Follow retries after every failure of the API server, at random intervals of up to 6
// seconds, and logs failures with their cause: the first one, and after that one line a
// minute.
//
// An API server before Kubernetes 1.31 does not know the field selector of Services. Follow then
// reads headless Services, too.
//
// If the API server does not have ServiceCIDRs (before Kubernetes 1.33) or forbids
// reading them, Follow logs that once and follows the other kinds.
func Follow(ctx context.Context, c *Client, sel tracker.Selector, node string, h Handler, log *slog.Logger) {
	var contact func(string)
	if h.Contact != nil {
		contact = func(resource string) { h.Contact(Source(resource)) }
	}
	retrier := apiretry.New(log, contact)
	if h.Failed != nil {
		retrier.Failed = func(resource string, err error) { h.Failed(Source(resource), err) }
	}
	label, field := sel.ServiceListOptions()
	sliceLabel, sliceField := sel.SliceListOptions()
	if h.All {
		label, field, sliceLabel, sliceField = "", "", "", ""
	}
	g := apiretry.NewGroup(ctx, retrier)
	start(g, c.core, Services, label, field, h, h.SetService, h.DeleteService)
	start(g, c.discovery, Slices, sliceLabel, sliceField, h, h.SetSlice, h.DeleteSlice)
	start(g, c.core, Nodes, "", fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(), h, func(n *v1.Node) {
		if n.Name == node {
			h.SetNode(n)
		}
	}, func(n types.NamespacedName) {
		if n.Name == node {
			h.DeleteNode()
		}
	})
	start(g, c.networking, ServiceCIDRs, "", "", h, h.SetServiceCIDR, func(n types.NamespacedName) { h.DeleteServiceCIDR(n.Name) })
	_ = g.Wait() // the context's
}

func start[T metav1.Object](g *apiretry.Group, client rest.Interface, s Source, label, field string, h Handler, set func(T), gone func(types.NamespacedName)) {
	synced := sync.OnceFunc(func() { h.Synced(s) })
	var absent func()
	if s == ServiceCIDRs {
		absent = synced
	}
	apiretry.Follow(g, apiretry.Source[T]{
		Resource: string(s), Field: field, Set: set, Gone: func(n types.NamespacedName, _ T) { gone(n) }, Synced: synced, Absent: absent,
		Requests: func() (*cache.ListWatch, any) { return apiretry.Requests(client, string(s), label), client },
	})
}
