//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Check reports whether everything is as the backend left it: nil, a [*ruleset.DriftError]
// if somebody else altered something, [ruleset.ErrNeedFull] if nothing is known, or
// the error of reading it. After any but nil the next delta must be a full one,
// which puts it right; [Backend.Apply] asks for it.
//
// It reads everything there is: one request for each virtual server, and a few
// more. An agent calls it at long intervals.
func (b *Backend) Check(ctx context.Context) error {
	return b.do(ctx, func() error {
		if b.states == nil {
			return ruleset.ErrNeedFull
		}
		for _, s := range b.states {
			err := b.compare(ctx, s)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				b.states = nil
				return err
			}
		}
		return nil
	})
}

// compare reads a family and compares it with what it is to be.
func (b *Backend) compare(ctx context.Context, s *state) error {
	drift := func(format string, args ...any) error {
		return &ruleset.DriftError{Backend: "ipvs", Family: s.family, What: fmt.Sprintf(format, args...)}
	}
	if err := b.device.find(); err != nil {
		return drift("%v", err)
	}
	found, err := b.readFamily(s.family, time.Now())
	if err != nil {
		return drift("%v", err)
	}
	s.stale = s.stale || !maps.Equal(s.own, found.own)
	s.own = found.own
	for a := range s.bound {
		if !found.bound.has(a) {
			return drift("address %s is gone from %s", a, b.config.Device)
		}
	}
	for a := range found.bound {
		if !s.bound.has(a) {
			return drift("%s has address %s", b.config.Device, a)
		}
	}
	for e, want := range s.entries {
		if f, ok := found.entries[e]; !ok || f.value != want.value {
			return drift("set %s lacks an element for %s port %d", e.set.name(s.family), e.addr, e.port)
		}
	}
	for e := range found.entries {
		if !s.entries.has(e) {
			return drift("set %s has an element for %s port %d", e.set.name(s.family), e.addr, e.port)
		}
	}
	for k, v := range s.virtuals {
		f := found.virtuals[k]
		if f == nil {
			return drift("virtual server %s is gone", k)
		}
		if f.virtual != v.virtual {
			return drift("virtual server %s was changed", k)
		}
		if !maps.EqualFunc(v.reals, f.reals, func(a, b realState) bool { return a.weight == b.weight }) {
			return drift("the real servers of %s were changed", k)
		}
	}
	for k := range found.virtuals {
		if s.virtuals[k] == nil && found.recognised(b.config, k) {
			return drift("there is a virtual server %s", k)
		}
	}
	tables := rules{family: s.family, mark: b.config.mark(), marks: b.config.Marks, node: s.node}.tables()
	have, err := saved(ctx, b.tools[s.family])
	if err != nil {
		return fmt.Errorf("ipvs: check: %w", err)
	}
	if ownRules(tables, have) != b.rules[s.family].saved {
		return drift("the iptables rules were changed")
	}
	return nil
}

// Tend does what time and the node call for rather than the ruleset: it removes
// real servers that have drained by now, and follows addresses that the node got or
// lost, for NodePorts. It costs next to nothing unless there is something to do, and
// one request for each virtual server with a real server that drains. The error is
// [ruleset.ErrNeedFull] if something is missing that was there, a
// [*ruleset.PartialError] if Services could not be brought to the node's new
// addresses, which the next call tries again; another one means that it has to be
// done again.
func (b *Backend) Tend(ctx context.Context, now time.Time) error {
	return b.do(ctx, func() error {
		if b.states == nil {
			return nil
		}
		err := b.followAddresses()
		failed := map[tracker.Key]error{}
		for _, s := range b.states {
			if err == nil {
				err = b.drain(s, now, false)
			}
			if err == nil && s.stale {
				u := newUpdate(b, s, map[tracker.Key]error{})
				u.addExternal()
				err = u.run(ctx, false)
				maps.Copy(failed, u.failed)
			}
		}
		if err == nil && len(failed) != 0 {
			return &ruleset.PartialError{Failed: failed}
		}
		if err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		return nil
	})
}

// followAddresses reads the node's addresses again if some have changed.
func (b *Backend) followAddresses() error {
	changed, err := b.device.changed()
	if err != nil || !changed {
		return err
	}
	for _, s := range b.states {
		own := map[netip.Addr]bool{}
		err := b.device.addresses(s.family, func(netip.Addr) {}, func(a netip.Addr) { own[a] = true })
		if err != nil {
			// It has to be looked at again, and the news is gone.
			b.states = nil
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		s.stale = s.stale || !maps.Equal(own, s.own)
		s.own = own
	}
	return nil
}

// tendInterval is how often [Backend.Watch] looks at what time calls for.
const tendInterval = time.Second

// Watch calls [Backend.Tend] every second and [Backend.Check] at the interval, until
// ctx is done or the backend is closed; it returns ctx's error or [os.ErrClosed]. It
// calls drifted with each error that is not ctx's nor a [*ruleset.PartialError]: what
// drifted should do is ask the cursor for a full delta and have it synced.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	last := time.Now()
	return ruleset.Watch(ctx, min(interval, tendInterval), func(ctx context.Context) error {
		now := time.Now()
		if now.Sub(last) >= interval {
			last = now
			return b.Check(ctx)
		}
		err := b.Tend(ctx, now)
		var partial *ruleset.PartialError
		if errors.As(err, &partial) {
			return nil // Tend tries again by itself
		}
		return err
	}, drifted)
}
