package apiretry

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

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
		var log strings.Builder
		var got []string
		do := func(o metav1.ListOptions) error {
			got = append(got, o.FieldSelector)
			if broken || o.FieldSelector != "" {
				return refused
			}
			return nil
		}
		r := retrier{Group: NewGroup(t.Context(), slog.New(slog.NewTextHandler(&log, nil))), field: selector, requests: &cache.ListWatch{
			ListWithContextFunc: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) { return nil, do(o) },
			WatchFuncWithContext: func(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
				return watch.NewEmptyWatch(), do(o)
			},
		}}
		lw := r.listWatch()
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
	g := NewGroup(t.Context(), slog.New(slog.DiscardHandler))
	g.Contact = func(resource string) {
		if resource != "services" {
			t.Errorf("resource %q", resource)
		}
		contacts++
	}
	var refused error
	r := retrier{Group: g, resource: "services", requests: &cache.ListWatch{
		ListWithContextFunc:  func(context.Context, metav1.ListOptions) (runtime.Object, error) { return nil, refused },
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return events, refused },
	}}
	lw := r.listWatch()
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
