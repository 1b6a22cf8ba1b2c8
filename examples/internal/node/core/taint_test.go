package core

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

const taintKey = "example.com/not-ready"

func nodeWith(keys ...string) *v1.Node {
	n := &v1.Node{}
	n.Name = "n1"
	for _, k := range keys {
		n.Spec.Taints = append(n.Spec.Taints, v1.Taint{Key: k})
	}
	return n
}

// TestStartupTaintIsRemovedUntilDone runs in simulated time.
func TestStartupTaintIsRemovedUntilDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "n1", errors.New("no"))
		var tries []time.Duration
		var reasons []string
		var fail error
		var mu sync.Mutex // the test holds it while it does not sleep
		mu.Lock()
		sleep := func(d time.Duration) {
			mu.Unlock()
			time.Sleep(d)
			synctest.Wait()
			mu.Lock()
		}
		began := time.Now()
		s := &startupTaint{key: taintKey, log: slog.New(slog.DiscardHandler), wake: make(chan struct{}, 1)}
		s.event = func(_ bool, reason, _ string) {
			mu.Lock()
			defer mu.Unlock()
			reasons = append(reasons, reason)
		}
		s.remove = func(_ context.Context, n *v1.Node, key string) error {
			mu.Lock()
			defer mu.Unlock()
			tries = append(tries, time.Since(began))
			if key != taintKey || len(n.Spec.Taints) != 2 {
				t.Errorf("removing %q of %v", key, n.Spec.Taints)
			}
			return fail
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.run(ctx) }()

		s.observe(nodeWith("other"))
		sleep(0)
		if len(tries) != 0 {
			t.Errorf("a node without the taint: %d requests", len(tries))
		}
		fail = forbidden
		s.observe(nodeWith("other", taintKey))
		sleep(time.Hour)
		// One at the start, six while the pauses grow from 1 s to 1 min, and 30 to 60 in the hour
		// with pauses of 1 to 2 min.
		if n := len(tries); n < 30 || n > 67 {
			t.Errorf("%d requests in an hour", n)
		}
		for i := range tries[1:] {
			if pause := tries[i+1] - tries[i]; pause < time.Second || pause > 2*longestTaintPause {
				t.Errorf("a pause of %v", pause)
			}
		}
		fail = nil
		sleep(2 * longestTaintPause)
		if !slices.Equal(reasons, []string{reasonTaintStays, reasonTaintRemoved}) {
			t.Errorf("events %q", reasons)
		}
		n := len(tries)
		sleep(time.Hour)
		s.observe(nodeWith("other"))
		sleep(0)
		if len(tries) != n {
			t.Errorf("%d requests after the taint was removed", len(tries)-n)
		}
		// The node registers again. Its version is outdated once.
		fail = apierrors.NewInvalid(schema.GroupKind{Kind: "Node"}, "n1", nil)
		s.observe(nodeWith(taintKey, "other"))
		sleep(0)
		fail = nil
		sleep(2 * firstTaintPause)
		if len(tries) != n+2 || len(reasons) != 3 {
			t.Errorf("%d requests and events %q after the node registered again", len(tries)-n, reasons)
		}
		mu.Unlock()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
