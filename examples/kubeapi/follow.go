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
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/tracker"
)

// Source is a kind of object that is followed.
type Source string

// The sources, named as resources are.
const (
	Services     Source = "services"
	Slices       Source = "endpointslices"
	Nodes        Source = "nodes"
	ServiceCIDRs Source = "servicecidrs"
)

// Handler is told of objects as they are, and of those that are gone. Its functions
// are called one at a time for each kind, but those of several kinds side by side.
// They must not keep or change what they are given for longer than the call, but
// for the Node.
type Handler struct {
	SetService        func(*v1.Service)
	DeleteService     func(types.NamespacedName)
	SetSlice          func(*discovery.EndpointSlice)
	DeleteSlice       func(types.NamespacedName)
	SetNode           func(*v1.Node)
	DeleteNode        func()
	SetServiceCIDR    func(*networking.ServiceCIDR)
	DeleteServiceCIDR func(name string)
	// Synced is called once for each source, when everything there was at first has
	// been handed in.
	Synced func(Source)
}

// Follow hands in everything there is, and then what changes, until ctx ends. It
// rides out whatever happens to the API server. Services and EndpointSlices are
// those a proxy with the selector serves; of nodes there is only the named one.
//
// An API server without ServiceCIDRs (before Kubernetes 1.33), or one that does not
// allow them to be read, is said so once; everything else goes on without.
func Follow(ctx context.Context, c *Client, sel tracker.Selector, node string, h Handler, log *slog.Logger) {
	listed := func(s Source) func() { return sync.OnceFunc(func() { h.Synced(s) }) }
	label, field := sel.ServiceListOptions()
	services := newStore(h.SetService, h.DeleteService, listed(Services))
	sliceLabel, sliceField := sel.SliceListOptions()
	slices := newStore(h.SetSlice, h.DeleteSlice, listed(Slices))
	nodes := newStore(h.SetNode, func(types.NamespacedName) { h.DeleteNode() }, listed(Nodes))
	cidrs := newStore(h.SetServiceCIDR, func(n types.NamespacedName) { h.DeleteServiceCIDR(n.Name) }, listed(ServiceCIDRs))

	var wg sync.WaitGroup
	follow := func(s Source, client rest.Interface, label, field string, expected any, store cache.ReflectorStore) {
		lw := cache.NewFilteredListWatchFromClient(client, string(s), metav1.NamespaceAll, func(o *metav1.ListOptions) {
			o.LabelSelector, o.FieldSelector = label, field
		})
		logger := logr.FromSlogHandler(log.Handler())
		r := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(lw, client), expected, store, cache.ReflectorOptions{
			Logger: &logger, Name: string(s), TypeDescription: string(s),
		})
		wg.Go(func() {
			if s == ServiceCIDRs {
				readable(ctx, client, log)
			}
			r.RunWithContext(ctx)
		})
	}
	follow(Services, c.core, label, field, &v1.Service{}, services)
	follow(Slices, c.discovery, sliceLabel, sliceField, &discovery.EndpointSlice{}, slices)
	follow(Nodes, c.core, "", fields.OneTermEqualSelector(metav1.ObjectNameField, node).String(), &v1.Node{}, nodes)
	follow(ServiceCIDRs, c.networking, "", "", &networking.ServiceCIDR{}, cidrs)
	wg.Wait()
}

// askAgain is how often a resource is asked for that is not there.
const askAgain = 10 * time.Minute

// readable waits until ServiceCIDRs can be read, and says once if they cannot.
func readable(ctx context.Context, c rest.Interface, log *slog.Logger) {
	for said := false; ; {
		err := c.Get().Resource(string(ServiceCIDRs)).VersionedParams(&metav1.ListOptions{Limit: 1}, metav1.ParameterCodec).Do(ctx).Error()
		wait := 5 * time.Second
		if err == nil {
			return
		}
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			if wait = askAgain; !said {
				said = true
				log.Info("the ranges of cluster IPs are not known, so packets to those that no Service has are not dropped", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// store is what a reflector keeps up to date: the names of what it has handed in.
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

// Add is called for an object that is new.
func (s *store[T]) Add(o any) error { return s.Update(o) }

// Update is called for an object that differs from what it was.
func (s *store[T]) Update(o any) error {
	v, ok := o.(T)
	if !ok {
		return fmt.Errorf("unexpected %T", o)
	}
	s.names[nameOf(v)] = struct{}{}
	s.set(v)
	return nil
}

// Delete is called for an object that is gone, with its last state, or with a
// tombstone by those who put a queue between.
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

// Transformer implements cache.TransformingStore. The reflector calls the function with
// each object of a list that it receives as a stream, and collects the results until the
// list is complete. The function hands the object in at once, so that only the names are
// collected: the objects of a large cluster take tens of megabytes.
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

// Replace is called with everything there is: at first, and after each time that
// the watch was lost for too long.
func (s *store[T]) Replace(list []any, _ string) error {
	now := make(map[types.NamespacedName]struct{}, len(list))
	var errs []error
	for _, o := range list {
		if key, ok := o.(cache.ExplicitKey); ok { // handed in by Transformer
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

// Resync is never asked for.
func (s *store[T]) Resync() error { return nil }
