package nfnl

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

// TestInterruptedDumpsAreRepeated has a dump that is interrupted some times, always, or fails, and a
// context that ends in the middle.
func TestInterruptedDumpsAreRepeated(t *testing.T) {
	failed := errors.New("failed")
	for _, c := range []struct {
		interrupted int
		then, want  error
		calls       int
		endsAfter   int
	}{
		{0, nil, nil, 1, 0},
		{3, nil, nil, 4, 0},
		{3, failed, failed, 4, 0},
		{1 << 20, nil, ErrInterrupted, attempts, 0},
		{1 << 20, nil, context.Canceled, 2, 2},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		calls := 0
		err := Again(ctx, func() error {
			if calls++; calls == c.endsAfter {
				cancel()
			}
			if calls <= c.interrupted {
				return fmt.Errorf("read: %w", ErrInterrupted)
			}
			return c.then
		})
		if !errors.Is(err, c.want) || calls != c.calls {
			t.Errorf("%+v: %v after %d calls", c, err, calls)
		}
	}
}
