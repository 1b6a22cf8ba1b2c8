package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// Check compares the kernel's state with the state that the backend wrote. It returns nil if they agree and before
// the first full delta, a [*dataplane.DriftError] if another process altered something, and an error that wraps
// [ruleset.ErrNeedFull] alone if the kernel's state is unknown after a failure. It can also return ctx's error,
// [os.ErrClosed], or the error of reading the kernel's state. After any error but ctx's the next delta must be a full
// one, which [Backend.Apply] requests.
//
// Check reads everything that the backend owns, with one request for each virtual server and some more. It is meant
// for long intervals.
func (b *Backend) Check(ctx context.Context) error {
	return b.do(ctx, func() error {
		switch {
		case !b.started:
			return nil
		case b.states == nil:
			return fmt.Errorf("ipvs: %w: the kernel's state is unknown", ruleset.ErrNeedFull)
		}
		for _, s := range b.states {
			err := b.compare(ctx, s)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				b.discard()
				return err
			}
		}
		return nil
	})
}

func (b *Backend) compare(ctx context.Context, s *state) error {
	drift := func(format string, args ...any) error {
		return &dataplane.DriftError{Backend: "ipvs", Family: s.family, What: fmt.Sprintf(format, args...)}
	}
	unread := func(err error) error { return drift("%v", err) }
	if err := b.kernel.findDevice(); err != nil {
		return unread(err)
	}
	found, err := b.readFamily(s.family, time.Now())
	if err != nil {
		return unread(err)
	}
	s.setOwn(found.own)
	for a := range s.bound.All() {
		if !found.bound.Has(a) {
			return drift("address %s is gone from %s", a, deviceName)
		}
	}
	for a := range found.bound.All() {
		if !s.bound.Has(a) {
			return drift("address %s was added to %s", a, deviceName)
		}
	}
	for e := range s.entries.All() {
		if !found.entries.Has(e) || found.entryMarks[e] != s.entryMarks[e] {
			return drift("set %s lacks an element for %s port %d", e.set.name(s.family), e.addr, e.port)
		}
	}
	for e := range found.entries.All() {
		if !s.entries.Has(e) {
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
		if len(v.reals) != 0 && v.forwarding != f.forwarding {
			return drift("the forwarding of %s was changed", k)
		}
	}
	for k, v := range found.virtuals {
		if s.virtuals[k] == nil && found.recognized(b.config, k, v.virtual) {
			return drift("virtual server %s was added", k)
		}
	}
	tables := b.config.rules(s.family, s.node).tables()
	have, err := b.kernel.savedRules(ctx, s.family)
	if err != nil {
		return fmt.Errorf("ipvs: cannot check: %w", err)
	}
	if ownRules(tables, have) != b.rules[s.family].saved {
		return drift("the iptables rules were changed")
	}
	if b.noMarks {
		return nil
	}
	if err := b.kernel.marksRestored(); err != nil {
		return drift("the chains that restore marks were changed: %v", err)
	}
	return nil
}

// followAddresses rereads the node's addresses if some have changed.
func (b *Backend) followAddresses() error {
	changed, err := b.kernel.addressesChanged()
	if err != nil || !changed {
		return err
	}
	for _, s := range b.states {
		own := map[netip.Addr]bool{}
		err := b.kernel.addresses(s.family, func(netip.Addr) {}, func(a netip.Addr) { own[a] = true })
		if err != nil {
			// The events are consumed, so only a full delta can recover.
			b.discard()
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		s.setOwn(own)
	}
	return nil
}

// retireInterval is how often [Backend.Watch] calls [Backend.Retire].
const retireInterval = time.Second

// Watch calls [Backend.Retire] every second and [Backend.Check] at the interval, until ctx is done or the Backend is
// closed; it returns ctx's error or one that wraps [os.ErrClosed]. It calls drifted with each error that is neither
// ctx's nor a [*ruleset.PartialError]. drifted should request a full delta from the cursor and a sync.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	last := time.Now()
	return dataplane.Watch(ctx, min(interval, retireInterval), func(ctx context.Context) error {
		now := time.Now()
		if now.Sub(last) >= interval {
			last = now
			return b.Check(ctx)
		}
		_, err := b.Retire(ctx)
		var partial *ruleset.PartialError
		if errors.As(err, &partial) {
			return nil // the next call tries again
		}
		return err
	}, drifted)
}
