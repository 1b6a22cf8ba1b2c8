// Package apiretry repeats failed requests to an API server for the reflectors of
// client-go. It differs from their own retries in these ways:
//
//   - The pauses grow to 3 to 6 seconds, not to 30 to 60, whatever Retry-After the answer has. So a node
//     follows the API server again within 10 seconds of its return, and the random part spreads a
//     thousand nodes over several seconds. While the API server is unreachable, each
//     resource costs one attempt in 4.5 seconds on average.
//   - A request whose answer does not begin within 18 seconds is ended. So a node follows an API server
//     that accepts requests and did not answer them within 25 seconds after it answers again.
//   - A watch without an event, of which there is one a minute even without a change, ends after 150 seconds.
//   - Watches that end immediately do not follow each other without a pause.
//   - A pause ends with its context. Some pauses of client-go do not.
//   - The first failure is logged with its cause, and after that one line a minute.
//     client-go logs refused connections at high verbosity only.
package apiretry

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
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
	// firstByte bounds the wait for the begin of an answer. An API server may keep a request in a queue for 15
	// seconds. slowFirstByte is the bound for a request that was ended once by an API server that answers a
	// small one: API servers end a list after a minute, and some proxies in front of them pass on the begin of a
	// watch with its first event, which may be that of the minute.
	firstByte     = 18 * time.Second
	slowFirstByte = 75 * time.Second
	// wholeAnswer bounds the time from the first byte of a list, or of an error, to the last.
	wholeAnswer = 2 * time.Minute
	// silence is how long a watch may have no event.
	silence = 150 * time.Second

	// watchInterval is the least average time between two watches of a resource, but for the first watchBurst.
	watchInterval = 1500 * time.Millisecond
	watchBurst    = 5
)

var (
	errNoAnswer = errors.New("no answer yet")
	errShort    = errors.New("watches end immediately")
	errLate     = errors.New("no answer in time")
	errEnded    = errors.New("the connection ended before the answer")
)

// pause returns the pause after failure n, counted from 0, whose error is err.
func pause(n int, err error) time.Duration {
	d := min(FirstPause<<min(n, 10), LongestPause)
	if s, ok := apierrors.SuggestsClientDelay(err); ok { // from Retry-After
		d = max(d, min(time.Duration(s)*time.Second, LongestPause))
	}
	return d + rand.N(d)
}

// Retrier repeats the failed requests of several reflectors, and logs failures once for
// all of them. Its methods are safe for concurrent use.
type Retrier struct {
	// Failed, if not nil, is called each time that a request fails, or has no answer yet. It must not call the
	// Retrier.
	Failed func(resource string, err error)

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
	list := func(out *runtime.Object) request {
		return func(ctx context.Context, o metav1.ListOptions) (err error) {
			*out, err = lw.ListWithContext(ctx, o)
			return err
		}
	}
	var nextWatch time.Time // a reflector makes one request at a time
	return &cache.ListWatch{
		DisableChunking: lw.DisableChunking,
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (out runtime.Object, err error) {
			end, err := r.repeat(ctx, resource, o, optional, list(&out), list(new(runtime.Object)))
			end()
			return out, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (out watch.Interface, err error) {
			r.pace(ctx, resource, &nextWatch)
			end, err := r.repeat(ctx, resource, o, optional, func(ctx context.Context, o metav1.ListOptions) error {
				out, err = lw.WatchWithContext(ctx, o)
				return err
			}, list(new(runtime.Object)))
			if err != nil {
				end()
				if ctx.Err() != nil {
					// A reflector logs an error. It stops a watch without an event.
					return watch.NewFake(), nil
				}
				return nil, err
			}
			return noted(out, end, func() { r.contacted(resource) }), nil
		},
	}
}

// Requests returns a ListWatch of the objects of a resource with a label selector. Unlike typed clients, it does not
// wait for as long as an answer's Retry-After says.
func Requests(client rest.Interface, resource, label string) *cache.ListWatch {
	get := func(o metav1.ListOptions) *rest.Request {
		o.LabelSelector = label
		return client.Get().Resource(resource).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0)
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return get(o).Do(ctx).Get()
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			return get(o).Watch(ctx)
		},
	}
}

// request is one request to the API server.
type request func(context.Context, metav1.ListOptions) error

// pace waits before a watch that begins too soon after others. A reflector does not wait after some errors,
// such as an expired resource version.
func (r *Retrier) pace(ctx context.Context, resource string, next *time.Time) {
	now := r.now()
	*next = next.Add(watchInterval)
	if earliest := now.Add(-(watchBurst - 1) * watchInterval); next.Before(earliest) {
		*next = earliest
	}
	wait := next.Sub(now)
	if wait <= 0 {
		return
	}
	r.failed(resource, errShort)
	select {
	case <-ctx.Done():
	case <-time.After(wait + rand.N(watchInterval)):
	}
}

func (r *Retrier) contacted(resource string) {
	if r.contact != nil {
		r.contact(resource)
	}
}

// noted returns w, and calls contact with each of its events but errors, and end when it has ended. It ends w if
// there is no event for too long. [watch.Filter] leaves a goroutine behind if the watch is stopped while an event
// is on its way.
func noted(w watch.Interface, end, contact func()) watch.Interface {
	events := make(chan watch.Event)
	n := watch.NewProxyWatcher(events)
	silent := time.NewTimer(silence)
	go func() {
		defer close(events)
		defer end()
		defer w.Stop()
		defer silent.Stop()
		for {
			select {
			case <-n.StopChan():
				return
			case <-silent.C: // without an error, so that the next watch continues
				return
			case e, ok := <-w.ResultChan():
				if !ok {
					return
				}
				silent.Reset(silence)
				if e.Type != watch.Error {
					contact()
				}
				select {
				case events <- e:
				case <-n.StopChan():
					return
				}
			}
		}
	}()
	return n
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

// repeat calls do until it succeeds, its error is one for the caller, or ctx ends. If the answer of do does not
// begin in time, repeat waits until the API server answers small, unless small is nil. end releases what the last
// request holds.
func (r *Retrier) repeat(ctx context.Context, resource string, o metav1.ListOptions, optional string, do, small request) (end func(), err error) {
	bound := firstByte
	for n := 0; ; n++ {
		slow := time.AfterFunc(answerTimeout, func() { r.slow(resource, small == nil) })
		err := r.selected(resource, o, optional, func(o metav1.ListOptions) (err error) {
			end, err = answered(ctx, bound, func(ctx context.Context) error { return do(ctx, o) })
			return err
		})
		slow.Stop()
		if ctx.Err() != nil {
			return end, err
		}
		if err == nil && small != nil {
			r.contacted(resource)
		}
		if err == nil || expected(err, o) {
			r.succeeded(resource)
			return end, err
		}
		if small != nil && errors.Is(err, errLate) {
			if bound == slowFirstByte {
				r.failed(resource, err)
			}
			bound = slowFirstByte
			if end, err = r.repeat(ctx, resource, metav1.ListOptions{Limit: 1}, "", small, nil); err == nil || ctx.Err() != nil {
				end()
				continue
			}
		}
		if n > 0 || !errors.Is(err, errEnded) { // the next attempt may know why
			r.failed(resource, err)
		}
		if !repeatable(err) {
			return end, err
		}
		select {
		case <-ctx.Done():
			return end, err
		case <-time.After(pause(n, err)):
		}
	}
}

// answered calls do, and ends the context of do if the API server does not begin to answer within bound, or to
// end the answer of a list within wholeAnswer. It counts neither the time that a request waits in the client nor, of a
// transport that does not report it to [httptrace], any. After an error, end has been called.
func answered(ctx context.Context, bound time.Duration, do func(context.Context) error) (end func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	end = func() { cancel(nil) }
	var began atomic.Int32 // 1 after a request, 2 after the first byte of its answer
	late := time.AfterFunc(time.Hour, func() { cancel(errLate) })
	late.Stop()
	err = do(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn:              func(string) { began.Store(1); late.Reset(bound) },
		GotFirstResponseByte: func() { began.Store(2); late.Reset(wholeAnswer) },
	}))
	late.Stop()
	if cause := context.Cause(ctx); err != nil && cause == errLate {
		err = errLate
	}
	if err == nil && began.Load() == 1 { // client-go returns an empty watch
		err = errEnded
	}
	if err != nil {
		end()
	}
	return end, err
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

// slow records that a request takes long. Only a small answer, and the first answer about a resource, is
// expected soon: a watch may have nothing to report.
func (r *Retrier) slow(resource string, small bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if small || !r.answered[resource] {
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
	if r.Failed != nil {
		r.Failed(resource, err)
	}
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
