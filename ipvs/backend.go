package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

var _ dataplane.Backend = (*Backend)(nil)

// Backend programs one network namespace's IPVS, with the dummy device, ipsets and iptables rules that it needs. It
// implements [dataplane.Backend]. Its methods are safe for concurrent use. After [Backend.Close], methods change
// nothing and return an error that wraps [os.ErrClosed]. [New] makes one; the zero value must not be used.
type Backend struct {
	config     Config
	complaints *complaint.Log

	mu     sync.Mutex
	kernel kernel
	// states holds the kernel's state in each family, or nil while that is unknown. before then holds the last known
	// state, until a full delta is complete.
	states, before []*state
	// started is set once a full delta was applied.
	started bool
	rules   map[tracker.Family]written
	// noMarks is set if the kernel cannot restore marks.
	noMarks bool
	closed  bool
	now     func() time.Time
}

// New returns a backend for the network namespace that c names. It checks that the system has what the backend needs,
// and leaves no change. The error is a [*dataplane.UnsupportedError] if the system lacks something, and wraps
// [ruleset.ErrConfig] if c is invalid. The first full delta programs the kernel, and closing the backend leaves
// everything in place.
//
// Package github.com/moby/ipvs runs "modprobe ip_vs" once in a process and writes a line to standard error if that
// fails. The failure has no consequence.
func New(ctx context.Context, c Config) (*Backend, error) {
	b, err := openBackend(ctx, c, toServe)
	if err != nil {
		return nil, err
	}
	if err := b.probe(); err != nil {
		b.kernel.close()
		return nil, err
	}
	return b, nil
}

// purpose is what a kernel is opened for.
type purpose uint8

const (
	// toServe opens everything, and fails if anything is missing.
	toServe purpose = iota
	// toInspect opens everything except iptables. The error wraps [dataplane.ErrNoRules]
	// if the dummy device is missing.
	toInspect
	// toClean opens everything except iptables. Without IPVS there are no virtual servers.
	toClean
	// toReadRules opens iptables.
	toReadRules
	// toSetParameters opens IPVS.
	toSetParameters
)

func openBackend(ctx context.Context, c Config, p purpose) (*Backend, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	k, err := open(ctx, c, p)
	if err != nil {
		return nil, err
	}
	return newBackend(c, k), nil
}

func newBackend(c Config, k kernel) *Backend {
	b := &Backend{config: c, complaints: complaint.NewLog(c.Log), rules: map[tracker.Family]written{}, now: time.Now}
	words := &recorder{config: c, backend: b}
	b.kernel = writes{k, func(write func(kernel) error) error {
		words.log(write)
		return write(k)
	}}
	return b
}

// Limits returns the limits of virtual servers for one Service, which are the same in both
// families.
func (b *Backend) Limits(tracker.Family) ruleset.Limits {
	return ruleset.Limits{Affinity: maxAffinity, Delta: elementsAtOnce}
}

// Close closes the backend's sockets and leaves everything in the kernel in place.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.closed = true
		b.states, b.before = nil, nil
		b.kernel.close()
	}
	return nil
}

// Apply makes the kernel agree with d, as [ruleset.Backend] requires.
//
// For a full delta, Apply first reads the kernel's state, and writes only the differences. Real servers with weight 0
// that no endpoint wants count as draining. Apply removes a virtual server that no Service wants if its signature or
// an element in one of the sets identifies it as a Backend's.
//
// A [*ruleset.PartialError] names Services that are not programmed, or only in part. The error wraps
// [ruleset.ErrNeedFull] if an object that was in the kernel is missing.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	return b.do(ctx, func() error {
		if d.Full {
			if err := b.read(ctx, d); err != nil {
				b.discard()
				return err
			}
		}
		if b.states == nil {
			return ruleset.ErrNeedFull
		}
		failed := map[tracker.Key]error{}
		for _, s := range b.states {
			u := newUpdate(b, s, failed)
			if err := u.apply(ctx, d); err != nil {
				if errors.Is(err, ruleset.ErrNeedFull) {
					b.config.Log.Warn("ipvs: state of the kernel is unknown, a full sync will repair it", slog.Any("error", err))
				}
				if d.Full || errors.Is(err, ruleset.ErrNeedFull) {
					b.discard()
				}
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		if d.Full {
			b.remember()
			// Binding addresses causes events, which may overflow the socket's buffer.
			if err := b.followAddresses(); err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		if len(failed) == 0 {
			return nil
		}
		for k, err := range failed {
			backendconf.Complain(b.complaints, slog.LevelError, k, "ipvs: service not programmed", err)
		}
		return &ruleset.PartialError{Failed: failed}
	})
}

// discard records that the kernel's state is unknown. It keeps the last known state, because another program may have
// removed the elements that identify virtual servers.
func (b *Backend) discard() {
	if b.before == nil {
		b.before = b.states
	}
	b.states = nil
}

// remember records that the kernel's state is known, after a full delta.
func (b *Backend) remember() {
	b.before, b.started = nil, true
	for _, s := range b.states {
		s.before = nil
	}
}

func (b *Backend) do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return fmt.Errorf("ipvs: backend: %w", os.ErrClosed)
	}
	return f()
}

func (b *Backend) read(ctx context.Context, d *ruleset.Delta) error {
	if !b.config.KeepSysctls {
		if err := b.kernel.setParameters(b.config.parameters(b.kernel.release())); err != nil {
			return err
		}
	}
	if err := b.kernel.setTimeouts(b.config.Timeouts); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	if err := b.kernel.ensureDevice(); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	switch err := b.kernel.restoreMarks(true); {
	case errors.Is(err, errors.ErrUnsupported):
		if !b.noMarks {
			b.config.Log.Warn("ipvs: internal traffic is treated as external if another program alters its mark", slog.Any("error", err))
		}
		b.noMarks = true
	case err != nil:
		return fmt.Errorf("ipvs: %w", err)
	}
	b.discard()
	var states []*state
	for i, f := range b.config.Families {
		for id := range setCount {
			if err := b.kernel.createSet(id, f); err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
		s, err := b.readFamily(f, b.now())
		if err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		if b.before != nil {
			s.before = b.before[i]
			for k, reals := range s.drainingReals {
				for at, now := range reals { // a drain that is known goes on
					reals[at] = cmp.Or(s.before.drainingReals[k][at], now)
				}
			}
		}
		if err := b.writeRules(ctx, s, d.Node, true); err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
		states = append(states, s)
	}
	b.states = states
	return nil
}

func (b *Backend) readFamily(f tracker.Family, now time.Time) (*state, error) {
	s := newState(f)
	for id := range setCount {
		err := b.kernel.listSet(id, f, s.hasEntry)
		if err != nil {
			return nil, err
		}
	}
	// From here on the kernel reports changes.
	if _, err := b.kernel.addressesChanged(); err != nil {
		return nil, err
	}
	err := b.kernel.addresses(f, s.bound.Installed, func(a netip.Addr) { s.own[a] = true })
	if err != nil {
		return nil, err
	}
	err = b.kernel.virtuals(f, func(k virtualKey, v virtual) {
		proto := k.proto
		if k.mark != 0 {
			proto = inet.TCP // a mark has no protocol; TCP servers drain
		}
		s.virtuals[k] = &virtualState{virtual: v, proto: proto, reals: map[netip.AddrPort]uint16{}}
		s.servers.Installed(k)
	})
	if err != nil {
		return nil, err
	}
	for k, v := range s.virtuals {
		err := b.kernel.reals(k, func(r real) {
			v.found(r)
			if r.weight == 0 {
				s.startDrain(k, r.at, now)
			}
		})
		if errors.Is(err, syscall.ESRCH) {
			// Another program deleted the virtual server after the list was read.
			delete(s.virtuals, k)
			delete(s.drainingReals, k)
			s.servers.Removed(k)
			continue
		}
		if err != nil {
			return nil, err
		}
	}
	return s, nil
}

type written struct {
	// text is the input of iptables-restore, and saved the output of iptables-save
	// afterwards.
	text, saved string
}

func (b *Backend) writeRules(ctx context.Context, s *state, n *ruleset.Node, read bool) error {
	r := b.config.rules(s.family, n)
	if err := r.validate(); err != nil {
		return err
	}
	tables := r.tables()
	last := b.rules[s.family]
	text := restoreAll(tables, nil)
	if !read && text == last.text {
		s.node = n
		return nil
	}
	have, err := b.kernel.savedRules(ctx, s.family)
	if err != nil {
		return err
	}
	if text != last.text || ownRules(tables, have) != last.saved {
		if err := b.kernel.restoreRules(ctx, s.family, restoreAll(tables, have)); err != nil {
			return err
		}
		if have, err = b.kernel.savedRules(ctx, s.family); err != nil {
			return err
		}
	}
	b.rules[s.family] = written{text, ownRules(tables, have)}
	s.node = n
	return nil
}
