package ruleset

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// DriftError is what a backend returns when it finds that somebody else altered
// what it had put in place. It is [ErrNeedFull]: a full delta puts it right. The
// zero value names nothing.
type DriftError struct {
	// Backend is the kind of backend, as "nftables".
	Backend string
	// Family is the address family in which something was altered.
	Family tracker.Family
	// What is what was found, for people.
	What string
}

// Error names the backend, the family and what was found.
func (e *DriftError) Error() string {
	return fmt.Sprintf("%s: %s was altered by somebody else: %s", e.Backend, e.Family, e.What)
}

// Unwrap returns [ErrNeedFull].
func (e *DriftError) Unwrap() error { return ErrNeedFull }

// Watch calls check at the interval, and failed with each of its errors but those
// after ctx is done, until ctx is done or check returns [os.ErrClosed]; it returns
// ctx's error or that one. It starts no goroutine and calls neither function twice
// at a time. An interval that is not positive is an error at once.
//
// Backends are watched in this way: see the Watch method of package nftables and
// of its siblings.
func Watch(ctx context.Context, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	if interval <= 0 {
		return fmt.Errorf("ruleset: watch: interval %v is not positive", interval)
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		switch err := check(ctx); {
		case errors.Is(err, os.ErrClosed):
			return err
		case err != nil && ctx.Err() == nil:
			failed(err)
		}
	}
}
