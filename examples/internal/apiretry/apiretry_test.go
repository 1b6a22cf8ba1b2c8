package apiretry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/go-proxier/proxier/internal/testing/must"
)

var services = schema.GroupResource{Resource: "services"}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *buffer) Reset() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.b.Reset()
}

// answers is a ListWatch whose lists take time and return the errors of a function.
func answers(takes time.Duration, f func() error) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-time.After(takes):
			}
			return nil, f()
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watch.NewEmptyWatch(), f() },
	}
}

func TestFailuresAreRepeatedAndLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log buffer
		r := New(slog.New(slog.NewTextHandler(&log, nil)), nil)
		start := time.Now()
		var attempts atomic.Int64
		down := errors.New("connection refused")
		list := func(resource string, up time.Duration) {
			lw := r.ListWatch(resource, answers(0, func() error {
				attempts.Add(1)
				if time.Since(start) < up {
					return down
				}
				return nil
			}), "")
			if _, err := lw.ListWithContext(t.Context(), metav1.ListOptions{}); err != nil {
				t.Error(err)
			}
			if late := time.Since(start) - up; late > 2*LongestPause {
				t.Errorf("%s: an attempt %v after the end of the outage", resource, late)
			}
		}
		done := make(chan struct{})
		go func() { defer close(done); list("services", 150*time.Second) }()
		list("slices", 130*time.Second)
		<-done
		// 3 to 6 seconds for each of two resources.
		if n := attempts.Load(); n < 2*130/6 || n > 2*150/3+10 {
			t.Errorf("%d attempts", n)
		}
		if warned, again := strings.Count(log.String(), "connection refused"), strings.Count(log.String(), "again"); warned != 3 || again != 1 {
			t.Errorf("%d lines of failure, want 3; %d of recovery, want 1:\n%s", warned, again, &log)
		}
	})
}

func TestSilenceIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log buffer
		r := New(slog.New(slog.NewTextHandler(&log, nil)), nil)
		lw := r.ListWatch("services", answers(20*time.Second, func() error { return nil }), "")
		go lw.ListWithContext(t.Context(), metav1.ListOptions{})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if strings.Count(log.String(), "no answer yet") != 1 {
			t.Errorf("after 5 s without an answer: %s", &log)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !strings.Contains(log.String(), "again") {
			t.Errorf("after the answer: %s", &log)
		}
		log.Reset()
		// A later request may take long.
		if _, err := lw.ListWithContext(t.Context(), metav1.ListOptions{}); err != nil || log.String() != "" {
			t.Errorf("error %v, log %s", err, &log)
		}
	})
}

func TestPauseEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lw := New(slog.New(slog.DiscardHandler), nil).ListWatch("services", answers(0, func() error { return errors.New("refused") }), "")
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		start := time.Now()
		if _, err := lw.WatchWithContext(ctx, metav1.ListOptions{}); err != nil || time.Since(start) != time.Minute {
			t.Errorf("error %v after %v, want none after a minute", err, time.Since(start))
		}
		if _, err := lw.ListWithContext(ctx, metav1.ListOptions{}); err == nil || time.Since(start) != time.Minute {
			t.Errorf("error %v after %v, want one after a minute", err, time.Since(start))
		}
	})
}

func TestErrorsForTheReflectorPass(t *testing.T) {
	tooLarge := apierrors.NewTimeoutError("too large", 1)
	tooLarge.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{errors.New("connection refused"), true},
		{apierrors.NewUnauthorized("x"), true},
		{apierrors.NewForbidden(services, "x", nil), true},
		{apierrors.NewNotFound(services, "x"), true},
		{apierrors.NewTooManyRequests("x", 1), true},
		{apierrors.NewServiceUnavailable("x"), true},
		{apierrors.NewInternalError(errors.New("x")), true},
		{apierrors.NewGenericServerResponse(http.StatusBadGateway, "GET", services, "", "x", 0, true), true},
		{apierrors.NewResourceExpired("x"), false},
		{apierrors.NewBadRequest("x"), false},
		{apierrors.NewInvalid(schema.GroupKind{}, "x", nil), false},
		{tooLarge, false},
	} {
		if got := repeatable(tt.err); got != tt.want {
			t.Errorf("%T %v: %v, want %v", tt.err, tt.err, got, tt.want)
		}
	}
}

// TestRefusedSelectorIsLeftOut reads from API servers that do not know a field selector, and from one
// that refuses the request for another reason.
func TestRefusedSelectorIsLeftOut(t *testing.T) {
	const selector = "spec.clusterIP!=None"
	refused := apierrors.NewBadRequest("field label not supported: spec.clusterIP")
	for _, broken := range []bool{false, true} {
		var log buffer
		var got []string
		do := func(o metav1.ListOptions) error {
			got = append(got, o.FieldSelector)
			if broken || o.FieldSelector != "" {
				return refused
			}
			return nil
		}
		r := New(slog.New(slog.NewTextHandler(&log, nil)), nil)
		lw := r.ListWatch("services", &cache.ListWatch{
			ListWithContextFunc: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) { return nil, do(o) },
			WatchFuncWithContext: func(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
				return watch.NewEmptyWatch(), do(o)
			},
		}, selector)
		_, list := lw.ListWithContext(t.Context(), metav1.ListOptions{})
		_, watched := lw.WatchWithContext(t.Context(), metav1.ListOptions{})
		want, line := []string{selector, "", ""}, "reading all objects"
		if broken {
			want, line = []string{selector, "", selector, ""}, "cannot read from the API server"
		}
		if !slices.Equal(got, want) || (list != nil) != broken || (watched != nil) != broken {
			t.Errorf("broken %t: requests %q, errors %v and %v", broken, got, list, watched)
		}
		if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), line) {
			t.Errorf("broken %t: log\n%s", broken, log.String())
		}
	}
}

// TestContactIsReported lists, watches and receives events, and fails.
func TestContactIsReported(t *testing.T) {
	contacts := 0
	events := watch.NewFake()
	r := New(slog.New(slog.DiscardHandler), func(resource string) {
		if resource != "services" {
			t.Errorf("resource %q", resource)
		}
		contacts++
	})
	var refused error
	lw := r.ListWatch("services", &cache.ListWatch{
		ListWithContextFunc:  func(context.Context, metav1.ListOptions) (runtime.Object, error) { return nil, refused },
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return events, refused },
	}, "")
	check := func(what string, want int) {
		t.Helper()
		if contacts != want {
			t.Errorf("%s: %d contacts, want %d", what, contacts, want)
		}
		contacts = 0
	}
	lw.ListWithContext(t.Context(), metav1.ListOptions{})
	check("a list", 1)
	w := must.Get(lw.WatchWithContext(t.Context(), metav1.ListOptions{}))(t)
	check("a watch", 1)
	for _, e := range []watch.EventType{watch.Added, watch.Bookmark, watch.Error} {
		go events.Action(e, nil)
		<-w.ResultChan()
	}
	check("two events and an error", 2)
	w.Stop()
	refused = apierrors.NewBadRequest("x")
	lw.ListWithContext(t.Context(), metav1.ListOptions{})
	check("a refused list", 0)
}

// TestStoppedWatchLeavesNoGoroutine stops a watch whose last event nothing receives.
func TestStoppedWatchLeavesNoGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in, contacts := watch.NewFake(), 0
		w := noted(in, func() {}, func() { contacts++ })
		in.Add(&v1.Service{})
		synctest.Wait()
		w.Stop()
		synctest.Wait() // the goroutine has ended, or synctest.Test reports a deadlock
		if contacts != 1 {
			t.Errorf("%d contacts, want 1", contacts)
		}
	})
}

func TestRetryAfterIsObeyedWithinTheLongestPause(t *testing.T) {
	for asked, most := range map[int]time.Duration{0: 2 * FirstPause, 1: 2 * time.Second, 120: 2 * LongestPause} {
		if d := pause(0, apierrors.NewTooManyRequests("x", asked)); d < most/2 || d > most {
			t.Errorf("asked for %d s: a pause of %v, want %v to %v", asked, d, most/2, most)
		}
	}
}
