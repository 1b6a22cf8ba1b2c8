package apiretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// logInterval is the time between two lines about failures that continue.
const logInterval = time.Minute

// Group follows several sources, which [Follow] adds. Its method Wait, which must be called, waits until the context
// ends and returns its error, or the first error of a source, which ends all. The Group repeats failed requests, and logs
// failures once for all sources.
type Group struct {
	*errgroup.Group
	// Context ends with the Group.
	context.Context
	// Contact, if not nil, is called each time that the API server has answered about a resource: with a list, the
	// begin of a watch, or an event.
	Contact func(resource string)
	// Failed, if not nil, is called each time that a request fails, or has no answer yet.
	Failed func(resource string, err error)

	log *slog.Logger

	mu sync.Mutex
	// failures is the number of sources whose last request failed. since is the time at which
	// the first of them failed, and logged the time of the last line.
	failures      int
	since, logged time.Time
}

// NewGroup returns a Group that follows its sources until ctx ends.
func NewGroup(ctx context.Context, log *slog.Logger) *Group {
	g, ctx := errgroup.WithContext(ctx)
	return &Group{Group: g, Context: ctx, log: log}
}

func (r *retrier) contacted() {
	if r.Contact != nil {
		r.Contact(r.resource)
	}
}

// failed records that a request failed, and logs it if it is time for a line.
func (r *retrier) failed(err error) {
	if r.Failed != nil {
		r.Failed(r.resource, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if !r.failing {
		if r.failures == 0 {
			r.since = now
		}
		r.failing = true
		r.failures++
	}
	if !r.logged.IsZero() && now.Sub(r.logged) < logInterval {
		return
	}
	r.logged = now
	r.log.Warn("cannot read from the API server; the rules stay as they are",
		"resource", r.resource, "for", now.Sub(r.since).Round(time.Second), "error", err)
}

// succeeded records a success, and logs that all requests succeed again.
func (r *retrier) succeeded() {
	r.answered = true
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.failing {
		return
	}
	r.failing = false
	if r.failures--; r.failures == 0 && !r.logged.Before(r.since) {
		r.log.Info("reading from the API server again", "after", time.Since(r.since).Round(time.Second))
	}
}

// Source is a kind of objects that [Follow] follows, such as those of type *v1.Service.
type Source[T metav1.Object] struct {
	// Resource is the name of the kind in the API, such as "services".
	Resource string
	// Informer has the objects, or else Requests returns how to list and watch them, and the client that does so.
	// Follow neither starts nor stops the informer, and removes its handler.
	Informer cache.SharedInformer
	Requests func() (requests *cache.ListWatch, client any)
	// Name, if not "", is the name of the only object to follow.
	Name string
	// Field is a field selector, which an API server may not know: Set must ignore the objects that it excludes.
	Field string
	// Absent, if not nil, is called once if the API server does not have the kind or does not allow to read it.
	// Follow then waits until it does.
	Absent func()
	// Set receives new and changed objects. It may keep an object only if it has an informer.
	Set func(T)
	// Gone receives the names of deleted objects.
	Gone func(types.NamespacedName)
	// Synced is called after all objects of a list were passed to Set.
	Synced func()
}

// Follow follows a source in a goroutine. It calls one function of s at a time, but for Synced with an informer. An
// error is that of an informer that has stopped.
func Follow[T metav1.Object](g *Group, s Source[T]) {
	g.Go(func() error { return follow(g, s) })
}

func follow[T metav1.Object](g *Group, s Source[T]) error {
	ctx := g.Context
	p := &store[T]{Source: s, log: g.log, names: map[cache.ObjectName]struct{}{}}
	if s.Informer != nil {
		h, err := s.Informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: p.pass, UpdateFunc: func(_, o any) { p.pass(o) }, DeleteFunc: func(o any) { _ = p.Delete(o) },
		})
		if err != nil {
			return err
		}
		defer s.Informer.RemoveEventHandler(h)
		if cache.WaitForCacheSync(ctx.Done(), h.HasSynced) {
			s.Synced()
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	requests, client := s.Requests()
	if s.Name != "" {
		s.Field = fields.OneTermEqualSelector(metav1.ObjectNameField, s.Name).String()
	}
	r := &retrier{Group: g, resource: s.Resource, requests: requests, field: s.Field, absent: s.Absent}
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(r.listWatch(), client),
		reflect.New(reflect.TypeFor[T]().Elem()).Interface(), p, cache.ReflectorOptions{Name: s.Resource, TypeDescription: s.Resource})
	// The embedded Handler keeps logr from unwrapping a Handler that it made from a
	// LogSink: it would initialize the sink, which may be in use.
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(struct{ slog.Handler }{g.log.Handler()}))
	// The pauses are for errors that are not repeated by the retrier. Those of Reflector.RunWithContext grow to a
	// minute, and cannot be set in client-go 1.35.
	_ = pauses().DelayWithReset(clock.RealClock{}, time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		if err := reflector.ListAndWatchWithContext(ctx); err != nil {
			cache.DefaultWatchErrorHandler(ctx, reflector, err)
		}
		return false, nil // until ctx ends
	})
	return context.Cause(ctx)
}

// store is a reflector's store. It passes objects on and keeps their names alone.
type store[T metav1.Object] struct {
	Source[T]
	log   *slog.Logger
	once  sync.Once
	names map[cache.ObjectName]struct{}
}

// pass passes on an object of an informer, which may have objects of another type. It logs the first of these.
func (s *store[T]) pass(o any) {
	if err := s.Update(o); err != nil {
		s.once.Do(func() {
			s.log.Warn("ignored the objects of an informer: they have another type", "error", err)
		})
	}
}

// Add is called for a new object.
func (s *store[T]) Add(o any) error { return s.Update(o) }

// Update is called for a changed object.
func (s *store[T]) Update(o any) error {
	v, ok := o.(T)
	switch {
	case !ok:
		return fmt.Errorf("unexpected %T, want %T", o, v)
	case s.Name != "" && s.Name != v.GetName():
		return nil
	case s.Informer == nil:
		s.names[cache.MetaObjectToName(v)] = struct{}{}
	}
	s.Set(v)
	return nil
}

// Delete is called for a deleted object, with its last state, or with a tombstone by
// callers with a queue.
func (s *store[T]) Delete(o any) error {
	name, err := cache.DeletionHandlingObjectToName(o)
	if err == nil {
		s.gone(name)
	}
	return err
}

func (s *store[T]) gone(name cache.ObjectName) {
	delete(s.names, name)
	if s.Name == "" || s.Name == name.Name {
		s.Gone(types.NamespacedName(name))
	}
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
		return cache.ExplicitKey(cache.MetaObjectToName(v).String()), s.Update(v)
	}
}

// Replace is called with all objects: at first, and after the watch was interrupted for too
// long.
func (s *store[T]) Replace(list []any, _ string) error {
	before := s.names
	s.names = make(map[cache.ObjectName]struct{}, len(list))
	var errs []error
	for _, o := range list {
		if key, ok := o.(cache.ExplicitKey); ok { // passed on by Transformer
			name, err := cache.ParseObjectName(string(key))
			errs = append(errs, err)
			s.names[name] = struct{}{}
		} else {
			errs = append(errs, s.Update(o))
		}
	}
	for name := range before {
		if _, ok := s.names[name]; !ok {
			s.gone(name)
		}
	}
	s.Synced()
	return errors.Join(errs...)
}

// Resync does nothing. The reflectors have no resync period.
func (s *store[T]) Resync() error { return nil }
