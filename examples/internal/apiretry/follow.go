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
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Group follows several sources, which [Follow] adds. Its method Wait, which must be called, waits until the context
// ends and returns its error, or the first error of a source, which ends all.
type Group struct {
	*Retrier
	*errgroup.Group
	// Context ends with the Group.
	context.Context
}

// NewGroup returns a Group that follows its sources until ctx ends.
func NewGroup(ctx context.Context, r *Retrier) *Group {
	g, ctx := errgroup.WithContext(ctx)
	return &Group{r, g, ctx}
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
	ctx, r := g.Context, g.Retrier
	p := &store[T]{Source: s, log: r.log, names: map[cache.ObjectName]struct{}{}}
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
	if s.Absent != nil {
		r.readable(ctx, s.Resource, requests, s.Absent)
	}
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(r.ListWatch(s.Resource, requests, s.Field), client),
		reflect.New(reflect.TypeFor[T]().Elem()).Interface(), p, cache.ReflectorOptions{Name: s.Resource, TypeDescription: s.Resource})
	// The embedded Handler keeps logr from unwrapping a Handler that it made from a
	// LogSink: it would initialize the sink, which may be in use.
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(struct{ slog.Handler }{r.log.Handler()}))
	// The pauses are for errors that are not repeated by the Retrier. Those of Reflector.RunWithContext grow to a
	// minute, and cannot be set in client-go 1.35.
	pauses := wait.Backoff{Duration: FirstPause, Cap: LongestPause, Factor: 2, Jitter: 1, Steps: 10}
	_ = pauses.DelayWithReset(clock.RealClock{}, time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
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
