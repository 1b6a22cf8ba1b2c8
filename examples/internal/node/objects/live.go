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

// peekTimeout is how long Watch waits for an API server.
const peekTimeout = 30 * time.Second

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
	wait, cancelWait := context.WithTimeout(ctx, peekTimeout)
	defer cancelWait()
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
	node, err := src.Node(wait, NeedOf(cfg))
	if err != nil {
		return nil, err
	}
	own, ranges, stopReading, err := OpenAddresses()
	if err != nil {
		return nil, err
	}
	stop = append(stop, stopReading)
	w, err := New(cfg, nil, node, WorldHooks{
		APIServer: FindAPIAddresses(wait, client, log),
		Own:       own,
		Ranges:    ranges,
		Keep:      true,
		Failed:    func(error) {},
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
			return nil, fmt.Errorf("cannot list the objects: %w", wait.Err())
		}
	}
	return &Live{World: w, Changed: changed, Close: closeAll}, nil
}
