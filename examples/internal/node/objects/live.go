package objects

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
)

const (
	// peekTimeout is how long Watch waits for an API server that answers.
	peekTimeout = 30 * time.Second
	// failingTimeout is how long Watch waits for one that refuses a resource, does not answer, or has no Node.
	failingTimeout = 5 * time.Second
)

// Peek returns the world in its present state.
func Peek(ctx context.Context, cfg *config.Config, log *slog.Logger) (*World, error) {
	live, err := Watch(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	live.Close()
	return live.World, nil
}

// Live is a world that follows its source until it is closed.
type Live struct {
	*World
	// Changed has a value if the world has changed since the last value was received.
	Changed <-chan struct{}
	Close   func()
}

// Watch returns the world after all objects are listed.
func Watch(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *Live, err error) {
	wait, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	defer time.AfterFunc(peekTimeout, func() { giveUp(fmt.Errorf("cannot list the objects: %w", context.DeadlineExceeded)) }).Stop()
	src, client, err := NewSource(cfg, nil, log)
	if err != nil {
		return nil, err
	}
	stop := []func(){src.Close}
	closeAll := sync.OnceFunc(func() {
		for _, f := range slices.Backward(stop) {
			f()
		}
	})
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	asking, cancelAsking := context.WithTimeout(wait, failingTimeout)
	defer cancelAsking()
	node, err := src.Node(asking, NeedOf(cfg))
	if err != nil {
		return nil, err
	}
	own, ranges, stopReading, err := OpenAddresses()
	if err != nil {
		return nil, err
	}
	stop = append(stop, stopReading)
	var failing sync.Map // timers by resource
	w, err := New(cfg, nil, node, WorldHooks{
		APIServer: FindAPIAddresses(wait, client, log),
		Own:       own,
		Ranges:    ranges,
		Keep:      true,
		NotRead: func(resource string, err error) {
			t := time.AfterFunc(failingTimeout, func() { giveUp(fmt.Errorf("cannot read %s: %w", resource, err)) })
			if _, ok := failing.LoadOrStore(resource, t); ok {
				t.Stop()
			}
		},
		Contact: func(resource string) {
			if t, ok := failing.LoadAndDelete(resource); ok {
				t.(*time.Timer).Stop()
			}
		},
		Failed: func(error) {},
	}, log)
	if err != nil {
		return nil, err
	}
	changed := make(chan struct{}, 1)
	w.Tracker.Notify(func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- src.Follow(ctx, w) }()
	stop = append(stop, func() {
		cancel()
		<-done
	})
	for !w.Tracker.Synced() {
		select {
		case <-changed:
		case <-wait.Done():
			return nil, context.Cause(wait)
		}
	}
	return &Live{World: w, Changed: changed, Close: closeAll}, nil
}
