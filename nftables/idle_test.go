//go:build linux

package nftables

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/nfnl"
)

// TestWatchSleepsUntilATransaction counts the calls of a check: few while nothing is
// committed, and one soon after a transaction of another process.
func TestWatchSleepsUntilATransaction(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	needNFT(t, h)
	ctx, cancel := context.WithCancel(t.Context())
	var calls atomic.Int32
	done := make(chan error, 1)
	go func() {
		done <- nfnl.WatchCommits(ctx, h.File(), time.Millisecond, func(context.Context) error {
			calls.Add(1)
			return nil
		}, func(err error) { t.Error(err) })
	}()
	waitFor := func(n int32) {
		t.Helper()
		// WatchCommits checks without a notification only after ten seconds.
		for end := time.Now().Add(9 * time.Second); calls.Load() < n; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d calls, want %d", calls.Load(), n)
			}
		}
	}
	waitFor(1)
	for range 3 {
		before := calls.Load()
		time.Sleep(50 * time.Millisecond)
		if now := calls.Load(); now != before {
			t.Errorf("%d calls while nothing was committed", now-before)
		}
		if _, err := h.Output("nft", "add table ip somebody; delete table ip somebody"); err != nil {
			t.Fatal(err)
		}
		waitFor(before + 1)
		time.Sleep(20 * time.Millisecond) // until it listens again
	}
	cancel()
	if err := <-done; err != context.Canceled {
		t.Error(err)
	}
}
