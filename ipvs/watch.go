//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Check compares the kernel's state with the state that the backend wrote. It returns nil
// if they agree, and a [*ruleset.DriftError] if another process altered something or if
// the kernel's state is unknown after a failure. It can also return ctx's error,
// [os.ErrClosed], or the error of reading the kernel's state. After any error but ctx's
// the next delta must be a full one, which [Backend.Apply] requests.
//
// Check reads everything that the backend owns, with one request for each virtual server
// and some more. It is meant for long intervals.
func (b *Backend) Check(ctx context.Context) error {
	return b.do(ctx, func() error {
		if b.states == nil {
			return &ruleset.DriftError{Backend: "ipvs", Family: b.config.Families[0], What: "the kernel's state is unknown: no full delta was applied since the last failure"}
		}
		for _, s := range b.states {
			err := b.compare(ctx, s)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				b.forget()
				return err
			}
		}
		return nil
	})
}

// compare reads a family and compares it with the backend's state.
func (b *Backend) compare(ctx context.Context, s *state) error {
	drift := func(format string, args ...any) error {
		return &ruleset.DriftError{Backend: "ipvs", Family: s.family, What: fmt.Sprintf(format, args...)}
	}
	unread := func(err error) error {
		if errors.Is(err, os.ErrClosed) {
			return fmt.Errorf("ipvs: cannot check: %w", err)
		}
		return drift("%v", err)
	}
	if err := b.device.find(); err != nil {
		return unread(err)
	}
	found, err := b.readFamily(s.family, time.Now())
	if err != nil {
		return unread(err)
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
			return drift("address %s was added to %s", a, b.config.Device)
		}
	}
	for e, want := range s.entries {
		if f, ok := found.entries[e]; !ok || f.value != want.value {
			return drift("set %s lacks an element for %s port %d", e.set.name(s.family), e.addr, e.port)
		}
	}
	for e := range found.entries {
		if !s.entries.has(e) {
			return drift("set %s has an unknown element for %s port %d", e.set.name(s.family), e.addr, e.port)
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
		if !maps.Equal(v.reals, f.reals) {
			return drift("the real servers of %s were changed", k)
		}
	}
	for k := range found.virtuals {
		if s.virtuals[k] == nil && found.recognised(b.config, k) {
			return drift("virtual server %s was added", k)
		}
	}
	tables := rules{family: s.family, mark: b.config.mark(), marks: b.config.Marks, node: s.node}.tables()
	have, err := saved(ctx, b.tools[s.family])
	if err != nil {
		return fmt.Errorf("ipvs: cannot check: %w", err)
	}
	if ownRules(tables, have) != b.rules[s.family].saved {
		return drift("the iptables rules were changed")
	}
	return nil
}

// Tend removes real servers that have drained, and updates NodePorts if the node's
// addresses have changed. now is the time against which [Drain].Limit is measured. Tend
// makes one request for each virtual server with a draining real server, and no other
// requests unless addresses have changed.
//
// The error wraps [ruleset.ErrNeedFull] if an object that was in the kernel is missing. It
// is a [*ruleset.PartialError] if NodePorts of some Services could not be updated; the
// next call tries again. After another error the caller calls Tend again.
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

// followAddresses rereads the node's addresses if some have changed.
func (b *Backend) followAddresses() error {
	changed, err := b.device.changed()
	if err != nil || !changed {
		return err
	}
	for _, s := range b.states {
		own := map[netip.Addr]bool{}
		err := b.device.addresses(s.family, func(netip.Addr) {}, func(a netip.Addr) { own[a] = true })
		if errors.Is(err, os.ErrClosed) {
			return err
		}
		if err != nil {
			// The events are consumed, so only a full delta can recover.
			b.forget()
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		s.stale = s.stale || !maps.Equal(own, s.own)
		s.own = own
	}
	return nil
}

// tendInterval is how often [Backend.Watch] calls [Backend.Tend].
const tendInterval = time.Second

// Watch calls [Backend.Tend] every second and [Backend.Check] at the interval, until
// ctx is done or a socket is closed; it returns ctx's error or [os.ErrClosed]. It calls
// drifted with each error that is neither ctx's nor a [*ruleset.PartialError]. The
// function drifted should request a full delta from the cursor and a sync.
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
			return nil // the next Tend tries again
		}
		return err
	}, drifted)
}
