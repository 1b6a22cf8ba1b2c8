//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// Check reports whether the tables were flushed, put back to an earlier state, or
// lost a jump to the backend's chains: nil, a [*ruleset.DriftError], [ruleset.ErrNeedFull]
// if nothing is known of them, [os.ErrClosed], or the error of looking. After a
// DriftError the next delta must be a full one; [Backend.Apply] asks for it.
//
// It asks for the jumps and for one rule in KUBE-PROXY-CANARY that is another one
// after every change, by one call of iptables-restore a table that changes
// nothing. What else somebody might alter, a full delta at long intervals sets
// right.
func (b *Backend) Check(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return os.ErrClosed
	}
	for _, f := range b.families {
		if err := f.check(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (f *family) check(ctx context.Context) error {
	if f.model == nil {
		return ruleset.ErrNeedFull
	}
	hooks := f.model.hooks()
	for t := range tables {
		in := &input{table: t}
		in.add("*", t.String())
		in.add("-C ", chainCanary, " ", f.canary[t])
		for _, h := range hooks {
			if h.table == t {
				in.add("-C ", h.chain, " ", h.rule)
			}
		}
		in.add("COMMIT")
		err := f.tool.apply(ctx, in)
		switch {
		case err == nil:
		case refused(err):
			f.model = nil
			drift := &ruleset.DriftError{Backend: "iptables", Family: f.family, What: "not there any more, in table " + t.String()}
			var e *CommandError
			if errors.As(err, &e) && e.Text != "" {
				drift.What += ": " + strings.TrimPrefix(e.Text, "-C ")
			}
			return drift
		default:
			return fmt.Errorf("iptables: check: %w", err)
		}
	}
	return nil
}

// Watch is [ruleset.Watch] with [Backend.Check]: it calls drifted with what that
// finds, until ctx is done or the backend is closed; it returns ctx's error or
// [os.ErrClosed]. What drifted should do is ask the cursor for a full delta and have
// it synced.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	return ruleset.Watch(ctx, interval, b.Check, drifted)
}
