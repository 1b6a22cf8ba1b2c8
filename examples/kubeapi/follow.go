package kubeapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

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
// the functions of one kind one at a time, and those of different kinds concurrently. The
// functions must not modify an object, and may keep it after the call only if it is a Node.
// Every field but All, Contact and Failed must be set.
type Handler struct {
	// All makes Follow follow Services and EndpointSlices that the selector excludes, too, for
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
	// does not have them or does not allow to read them.
	Synced func(Source)
	// Contact is called each time that the API server has answered about a source: with a list,
	// the begin of a watch, or an event, of which there is one a minute even without a change.
	// So it tells how old the objects may be. Calls may be concurrent.
	Contact func(Source)
	// Failed is called each time that a request about a source fails, or has no answer yet. Follow goes on. Calls
	// may be concurrent.
	Failed func(Source, error)
}

// Follow passes all objects to the handler, and then every change, until ctx ends. It
// follows the Services and EndpointSlices that a proxy with the selector serves, the
// ServiceCIDRs, and the Node of the given name. It returns soon after ctx ends, and leaves
// no goroutine behind that does more than to end its request.
//
// Follow retries after every failure of the API server, at random intervals of up to 6
// seconds, and logs failures with their cause: the first one, and after that one line a
// minute.
//
// An API server before Kubernetes 1.31 does not know the field selector of Services. Follow then
// reads headless Services, too.
//
// If the API server does not have ServiceCIDRs (before Kubernetes 1.33) or does not allow to
// read them, Follow logs that once and follows the other kinds.
func Follow(ctx context.Context, c *Client, sel tracker.Selector, node string, h Handler, log *slog.Logger) {
	listed := func(s Source) func() { return sync.OnceFunc(func() { h.Synced(s) }) }
	label, field := sel.ServiceListOptions()
	services := newStore(h.SetService, h.DeleteService, listed(Services))
	sliceLabel, sliceField := sel.SliceListOptions()
	if h.All {
		label, field, sliceLabel, sliceField = "", "", "", ""
	}
	slices := newStore(h.SetSlice, h.DeleteSlice, listed(Slices))
	nodes := newStore(func(n *v1.Node) {
		if n.Name == node {
			h.SetNode(n)
		}
	}, func(n types.NamespacedName) {
		if n.Name == node {
			h.DeleteNode()
		}
	}, listed(Nodes))
	cidrs := newStore(h.SetServiceCIDR, func(n types.NamespacedName) { h.DeleteServiceCIDR(n.Name) }, listed(ServiceCIDRs))

	var contact func(string)
	if h.Contact != nil {
		contact = func(resource string) { h.Contact(Source(resource)) }
	}
	retrier := apiretry.New(log, contact)
	if h.Failed != nil {
		retrier.Failed = func(resource string, err error) { h.Failed(Source(resource), err) }
	}
	// The embedded Handler keeps logr from unwrapping a Handler that it made from a
	// LogSink: it would initialize the sink, which may be in use.
	logger := logr.FromSlogHandler(struct{ slog.Handler }{log.Handler()})
	var wg sync.WaitGroup
	follow := func(s Source, client rest.Interface, label, field string, expected any, store cache.ReflectorStore) {
		lw := retrier.ListWatch(string(s), apiretry.Requests(client, string(s), label), field)
		r := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(lw, client), expected, store, cache.ReflectorOptions{
			Name: string(s), TypeDescription: string(s),
		})
		wg.Go(func() {
			if s == ServiceCIDRs {
				apiretry.ReadableCIDRs(ctx, log, func(ctx context.Context) error {
					err := client.Get().Resource(string(ServiceCIDRs)).VersionedParams(&metav1.ListOptions{Limit: 1}, metav1.ParameterCodec).Do(ctx).Error()
					if err != nil && h.Failed != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
						h.Failed(s, err)
					}
					return err
				}, cidrs.synced)
			}
			run(klog.NewContext(ctx, logger), r)
		})
	}
	follow(Services, c.core, label, field, &v1.Service{}, services)
	follow(Slices, c.discovery, sliceLabel, sliceField, &discovery.EndpointSlice{}, slices)
	follow(Nodes, c.core, "", fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(), &v1.Node{}, nodes)
	follow(ServiceCIDRs, c.networking, "", "", &networking.ServiceCIDR{}, cidrs)
	wg.Wait()
}

// run lists and watches until ctx ends. The pauses are for errors that are not repeated by the
// retrier. Those of Reflector.RunWithContext grow to a minute, and cannot be set in client-go 1.35.
func run(ctx context.Context, r *cache.Reflector) {
	pauses := wait.Backoff{Duration: apiretry.FirstPause, Cap: apiretry.LongestPause, Factor: 2, Jitter: 1, Steps: 10}
	_ = pauses.DelayWithReset(clock.RealClock{}, time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		if err := r.ListAndWatchWithContext(ctx); err != nil {
			cache.DefaultWatchErrorHandler(ctx, r, err)
		}
		return false, nil // until ctx ends
	})
}

// store is a reflector's store. It passes objects on and keeps their names alone.
type store[T metav1.Object] struct {
	set    func(T)
	gone   func(types.NamespacedName)
	synced func()
	names  map[types.NamespacedName]struct{}
}

func newStore[T metav1.Object](set func(T), gone func(types.NamespacedName), synced func()) *store[T] {
	return &store[T]{set: set, gone: gone, synced: synced, names: map[types.NamespacedName]struct{}{}}
}

func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// Add is called for a new object.
func (s *store[T]) Add(o any) error { return s.Update(o) }

// Update is called for a changed object.
func (s *store[T]) Update(o any) error {
	v, ok := o.(T)
	if !ok {
		return fmt.Errorf("unexpected %T", o)
	}
	s.names[nameOf(v)] = struct{}{}
	s.set(v)
	return nil
}

// Delete is called for a deleted object, with its last state, or with a tombstone by
// callers with a queue.
func (s *store[T]) Delete(o any) error {
	name, err := cache.DeletionHandlingObjectToName(o)
	if err != nil {
		return err
	}
	n := types.NamespacedName{Namespace: name.Namespace, Name: name.Name}
	delete(s.names, n)
	s.gone(n)
	return nil
}

// Transformer implements cache.TransformingStore. The reflector calls the returned function
// with each object of a list that it receives as a stream, and collects the results until
// the list is complete. The function passes the object on immediately and returns its name, so
// the reflector collects names alone: the objects of a large cluster take tens of megabytes.
func (s *store[T]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) {
		v, ok := o.(T)
		if !ok {
			return o, nil
		}
		if err := s.Update(v); err != nil {
			return nil, err
		}
		return cache.ExplicitKey(nameOf(v).String()), nil
	}
}

// Replace is called with all objects: at first, and after the watch was interrupted for too
// long.
func (s *store[T]) Replace(list []any, _ string) error {
	now := make(map[types.NamespacedName]struct{}, len(list))
	var errs []error
	for _, o := range list {
		if key, ok := o.(cache.ExplicitKey); ok { // passed on by Transformer
			n, err := cache.ParseObjectName(string(key))
			if err != nil {
				errs = append(errs, err)
			}
			now[types.NamespacedName{Namespace: n.Namespace, Name: n.Name}] = struct{}{}
			continue
		}
		v, ok := o.(T)
		if !ok {
			errs = append(errs, fmt.Errorf("unexpected %T", o))
			continue
		}
		now[nameOf(v)] = struct{}{}
		s.set(v)
	}
	for name := range s.names {
		if _, ok := now[name]; !ok {
			s.gone(name)
		}
	}
	s.names = now
	s.synced()
	return errors.Join(errs...)
}

// Resync does nothing. The reflectors have no resync period.
func (s *store[T]) Resync() error { return nil }
