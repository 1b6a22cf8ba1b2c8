package dataplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// DriftError is the error of a backend that finds that another process changed the
// backend's objects. It wraps [ruleset.ErrNeedFull]: a full delta repairs the change. The
// zero value names no object.
type DriftError struct {
	// Backend is the kind of backend, such as "nftables".
	Backend string
	// Family is the address family of the change.
	Family tracker.Family
	// What describes the change for people.
	What string
}

// Error returns the backend, the family and the change.
func (e *DriftError) Error() string {
	return fmt.Sprintf("%s: %s was altered by another process: %s", e.Backend, e.Family, e.What)
}

// Unwrap returns [ruleset.ErrNeedFull].
func (e *DriftError) Unwrap() error { return ruleset.ErrNeedFull }

// Watch calls check at the interval until ctx is done or check returns
// [os.ErrClosed]. It returns ctx's error or that of check. It calls failed with every
// other error of check, except after ctx is done. It starts no goroutine and never
// calls check and failed concurrently. It returns an error immediately if the interval is
// not positive. The Watch methods of packages nftables, iptables and ipvs use it.
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
