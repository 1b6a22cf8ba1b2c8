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
	"net/http/httptrace"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
)

const (
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
	// absentInterval is the time between two attempts to read a resource that does not exist or is forbidden.
	absentInterval = 10 * time.Minute

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

// pauses returns the pauses after failures. The random part of a pause is up to as long as the other part.
func pauses() wait.Backoff {
	return wait.Backoff{Duration: 400 * time.Millisecond, Cap: 3 * time.Second, Factor: 2, Jitter: 1, Steps: 10}
}

// retrier repeats the requests of a reflector about a resource. A reflector makes one request at a time.
type retrier struct {
	*Group
	resource string
	requests *cache.ListWatch
	// field is the optional field selector, or "" if the API server has refused it.
	field string
	// absent is that of the Source. missing is set after it was called.
	absent  func()
	missing bool
	// answered is set after the API server has answered once.
	answered bool
	// failing is set while the last request failed. The lock of the Group guards it.
	failing bool
}

// listWatch returns a ListWatch that does the same as r.requests and repeats failed requests
// until they succeed or their context ends; then a watch has no events. It returns errors about which a reflector
// must do something itself, such as an expired resource version.
//
// The requests have the optional field selector, unless the API server refuses it: the reader must
// ignore the objects that it excludes.
func (r *retrier) listWatch() *cache.ListWatch {
	// A reflector does not wait after some errors, such as an expired resource version. Nodes differ in their pace.
	pace := flowcontrol.NewTokenBucketRateLimiter(float32(1/wait.Jitter(watchInterval, 0.5).Seconds()), watchBurst)
	return &cache.ListWatch{
		DisableChunking: r.requests.DisableChunking,
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (out runtime.Object, err error) {
			end, err := r.repeat(ctx, o, false, func(ctx context.Context, o metav1.ListOptions) error {
				out, err = r.requests.ListWithContext(ctx, o)
				return err
			})
			end()
			return out, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (out watch.Interface, err error) {
			if !pace.TryAccept() {
				r.failed(errShort)
				_ = pace.Wait(ctx) // or ctx has ended
			}
			end, err := r.repeat(ctx, o, false, func(ctx context.Context, o metav1.ListOptions) error {
				out, err = r.requests.WatchWithContext(ctx, o)
				return err
			})
			if err == nil {
				return noted(out, end, r.contacted), nil
			}
			end()
			if ctx.Err() != nil {
				// A reflector logs an error. It stops a watch without an event.
				return watch.NewFake(), nil
			}
			return nil, err
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

// request is one request to the API server.
type request func(context.Context, metav1.ListOptions) error

// selected calls do with the optional field selector, and without it if the API server refuses the
// request.
func (r *retrier) selected(o metav1.ListOptions, do func(metav1.ListOptions) error) error {
	with := o
	with.FieldSelector = r.field
	refused := do(with)
	if r.field == "" || !apierrors.IsBadRequest(refused) {
		return refused
	}
	err := do(o)
	if apierrors.IsBadRequest(err) {
		return err // for another reason
	}
	r.log.Info("the API server does not know a field selector: reading all objects", "resource", r.resource, "selector", r.field, "error", refused)
	r.field = ""
	return err
}

// repeat calls do until it succeeds, its error is one for the caller, or ctx ends. If the answer of do does not
// begin in time, repeat waits until the API server answers a small request. end releases what the last request holds.
func (r *retrier) repeat(ctx context.Context, o metav1.ListOptions, small bool, do request) (end func(), err error) {
	bound, pauses := firstByte, pauses()
	for n := 0; ; n++ {
		// Only a small answer, and the first one about a resource, is expected soon: a watch may have nothing to report.
		slow := time.AfterFunc(answerTimeout, func() { r.failed(errNoAnswer) })
		if !small && r.answered {
			slow.Stop()
		}
		err := r.selected(o, func(o metav1.ListOptions) (err error) {
			end, err = answered(ctx, bound, func(ctx context.Context) error { return do(ctx, o) })
			return err
		})
		slow.Stop()
		if ctx.Err() != nil {
			return end, err
		}
		if err == nil && !small {
			r.contacted()
		}
		if err == nil || expected(err, o) {
			r.succeeded()
			return end, err
		}
		if !small && errors.Is(err, errLate) {
			if bound == slowFirstByte {
				r.failed(err)
			}
			bound = slowFirstByte
			end, err = r.repeat(ctx, metav1.ListOptions{Limit: 1}, true, func(ctx context.Context, o metav1.ListOptions) error {
				_, err := r.requests.ListWithContext(ctx, o)
				return err
			})
			if err == nil || ctx.Err() != nil {
				end()
				continue
			}
		}
		pause := pauses.Step()
		switch {
		case r.absent != nil && !r.answered && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)):
			if pause = absentInterval; !r.missing {
				r.missing = true
				r.log.Info("cannot read ServiceCIDRs: packets to cluster IPs that no Service has are not dropped", "error", err)
				r.absent()
			}
		case n > 0 || !errors.Is(err, errEnded): // the next attempt may know why
			r.failed(err)
		}
		if !repeatable(err) {
			return end, err
		}
		select {
		case <-ctx.Done():
			return end, err
		case <-time.After(pause):
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
