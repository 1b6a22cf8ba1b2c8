// Package apiretry repeats failed requests to an API server for the reflectors of
// client-go. It differs from their own retries in three ways:
//
//   - The pauses grow to 3 to 6 seconds, not to 30 to 60. So a node follows the API
//     server again within 10 seconds of its return, and the random part spreads a
//     thousand nodes over several seconds. While the API server is unreachable, each
//     resource costs one attempt in 4.5 seconds on average.
//   - A pause ends with its context. Some pauses of client-go do not.
//   - The first failure is logged with its cause, and after that one line a minute.
//     client-go logs refused connections at high verbosity only.
package apiretry

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

const (
	// FirstPause and LongestPause are the first and the longest pause after a failure
	// without the random part, which adds up to the same time again.
	FirstPause   = 400 * time.Millisecond
	LongestPause = 3 * time.Second

	// logInterval is the time between two lines about failures that continue.
	logInterval = time.Minute
	// answerTimeout is how long the API server may take for the first answer about a
	// resource before that is logged as a failure. The request continues.
	answerTimeout = 4 * time.Second
)

var errNoAnswer = errors.New("no answer yet")

// pause returns the pause after failure n, counted from 0.
func pause(n int) time.Duration {
	d := min(FirstPause<<min(n, 10), LongestPause)
	return d + rand.N(d)
}

// Retrier repeats the failed requests of several reflectors, and logs failures once for
// all of them. Its methods are safe for concurrent use.
type Retrier struct {
	log     *slog.Logger
	contact func(resource string) // nil for none
	now     func() time.Time      // for tests

	mu sync.Mutex
	// failing holds the resources whose last request failed. since is the time at which
	// the first of them failed, and logged the time of the last line.
	failing map[string]bool
	// answered holds the resources about which the API server has answered once.
	answered      map[string]bool
	since, logged time.Time
	// unselected holds the resources whose optional field selector the API server refused.
	unselected map[string]bool
}

// New returns a Retrier. The log is required. contact, if not nil, is called each time that the API
// server has answered about a resource: with a list, the begin of a watch, or an event.
func New(log *slog.Logger, contact func(resource string)) *Retrier {
	return &Retrier{log: log, contact: contact, now: time.Now, failing: map[string]bool{}, answered: map[string]bool{}, unselected: map[string]bool{}}
}

// ListWatch returns a ListWatch that does the same as lw and repeats failed requests
// until they succeed or their context ends; then a watch has no events. It returns errors about which a reflector
// must do something itself, such as an expired resource version.
//
// The requests have the optional field selector, unless the API server refuses it: the reader must
// ignore the objects that it excludes.
func (r *Retrier) ListWatch(resource string, lw *cache.ListWatch, optional string) *cache.ListWatch {
	return &cache.ListWatch{
		DisableChunking: lw.DisableChunking,
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (out runtime.Object, err error) {
			err = r.repeat(ctx, resource, o, optional, func(o metav1.ListOptions) error { out, err = lw.ListWithContext(ctx, o); return err })
			return out, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (out watch.Interface, err error) {
			err = r.repeat(ctx, resource, o, optional, func(o metav1.ListOptions) error { out, err = lw.WatchWithContext(ctx, o); return err })
			if err != nil && ctx.Err() != nil {
				// A reflector logs an error. It stops a watch without an event.
				return watch.NewFake(), nil
			}
			if err == nil && r.contact != nil {
				out = noted(out, func() { r.contact(resource) })
			}
			return out, err
		},
	}
}

// noted returns w, and calls contact with each of its events but errors. [watch.Filter] leaves a goroutine
// behind if the watch is stopped while an event is on its way.
func noted(w watch.Interface, contact func()) watch.Interface {
	n := &notedWatch{Interface: w, events: make(chan watch.Event), stopped: make(chan struct{})}
	n.stop = sync.OnceFunc(func() { close(n.stopped) })
	go func() {
		defer close(n.events)
		for e := range w.ResultChan() {
			if e.Type != watch.Error {
				contact()
			}
			select {
			case n.events <- e:
			case <-n.stopped:
			}
		}
	}()
	return n
}

type notedWatch struct {
	watch.Interface
	events  chan watch.Event
	stopped chan struct{}
	stop    func()
}

func (n *notedWatch) ResultChan() <-chan watch.Event { return n.events }

func (n *notedWatch) Stop() {
	n.stop()
	n.Interface.Stop()
}

// selected calls do with the optional field selector, and without it if the API server refuses the
// request.
func (r *Retrier) selected(resource string, o metav1.ListOptions, optional string, do func(metav1.ListOptions) error) error {
	r.mu.Lock()
	without := optional == "" || r.unselected[resource]
	r.mu.Unlock()
	if without {
		return do(o)
	}
	with := o
	with.FieldSelector = optional
	refused := do(with)
	if !apierrors.IsBadRequest(refused) {
		return refused
	}
	err := do(o)
	if apierrors.IsBadRequest(err) {
		return err // for another reason
	}
	r.mu.Lock()
	r.unselected[resource] = true
	r.mu.Unlock()
	r.log.Info("the API server does not know a field selector: reading all objects", "resource", resource, "selector", optional, "error", refused)
	return err
}

// repeat calls do until it succeeds, its error is one for the caller, or ctx ends.
func (r *Retrier) repeat(ctx context.Context, resource string, o metav1.ListOptions, optional string, do func(metav1.ListOptions) error) error {
	for n := 0; ; n++ {
		slow := time.AfterFunc(answerTimeout, func() { r.slow(resource) })
		err := r.selected(resource, o, optional, do)
		slow.Stop()
		if ctx.Err() != nil {
			return err
		}
		if err == nil && r.contact != nil {
			r.contact(resource)
		}
		if err == nil || expected(err, o) {
			r.succeeded(resource)
			return err
		}
		r.failed(resource, err)
		if !repeatable(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause(n)):
		}
	}
}

// repeatable reports whether a request that failed with err can succeed if it is sent
// again: the API server did not answer, does not serve yet, or refused the client. Others
// mean that the request itself is at fault.
func repeatable(err error) bool {
	var status apierrors.APIStatus
	switch {
	case !errors.As(err, &status):
		return true
	case apierrors.IsTimeout(err), apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge):
		return false // the resource version may be one that the API server does not have yet
	case apierrors.IsUnauthorized(err), apierrors.IsForbidden(err), apierrors.IsNotFound(err), apierrors.IsTooManyRequests(err):
		return true
	}
	return status.Status().Code >= 500
}

// expected reports whether a reflector sends another request after err, as it does without a failure.
func expected(err error, o metav1.ListOptions) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) ||
		apierrors.IsTimeout(err) || apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) ||
		o.SendInitialEvents != nil && apierrors.IsInvalid(err) // before Kubernetes 1.32, by default
}

// slow records that a request takes long. Only the first answer about a resource is
// expected soon: a watch may have nothing to report.
func (r *Retrier) slow(resource string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.answered[resource] {
		r.record(resource, errNoAnswer)
	}
}

// failed records that a request failed.
func (r *Retrier) failed(resource string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record(resource, err)
}

// record records a failure and logs it if it is time for a line. The caller holds r.mu.
func (r *Retrier) record(resource string, err error) {
	now := r.now()
	if len(r.failing) == 0 {
		r.since = now
	}
	r.failing[resource] = true
	if !r.logged.IsZero() && now.Sub(r.logged) < logInterval {
		return
	}
	r.logged = now
	r.log.Warn("cannot read from the API server; the rules stay as they are",
		"resource", resource, "for", now.Sub(r.since).Round(time.Second), "error", err)
}

// succeeded records a success, and logs that all requests succeed again.
func (r *Retrier) succeeded(resource string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answered[resource] = true
	if !r.failing[resource] {
		return
	}
	if delete(r.failing, resource); len(r.failing) == 0 && !r.logged.Before(r.since) {
		r.log.Info("reading from the API server again", "after", r.now().Sub(r.since).Round(time.Second))
	}
}
