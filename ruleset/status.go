package ruleset

import (
	"fmt"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// Status is what a [Cursor] knows of one Service port.
type Status struct {
	// Port is the version in effect, nil for none: the result of [Cursor.Port].
	Port *Port
	// Since is the time at which the backend accepted Port. It is zero if Port is nil.
	Since time.Time
	// Err is the error of the last attempt to bring another version into effect, if that attempt
	// failed or was refused. It is nil if there was no attempt yet.
	Err error
	// WaitingSince is the time at which the Engine compiled the first version that is not in
	// effect, or removed the Service. It is zero if the backend has what it should have.
	WaitingSince time.Time
}

// failure is the last failure of an ID.
type failure struct {
	err   error
	since uint64 // as state.since, before the first failure
	// of is a version of the Service. Its key differs if the ID has been reused.
	of *Port
}

// Status returns what is in effect of a Service port, since when, and what holds up the wanted
// version. It costs a look-up among the Service's ports, and a comparison of two versions. Changes
// that neither a [Cursor.Sync] nor a [Engine.Snapshot] has taken from the tracker do not count. The
// result for an unknown key is the zero value.
//
// A Cursor stores one time for each Service, 8 bytes. For each Service that failed or was refused
// it stores some 100 bytes and the error that the backend returned, until the Service is accepted.
// Services that failed together, because Apply returned another error than a [*PartialError],
// share the error. A tenant can have a [Port] with an error for each Service port that the
// tenant may create, so backends should return short errors.
func (c *Cursor) Status(k tracker.Key) (s Status) {
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	id := e.find(k)
	if id == 0 || int(id) >= len(c.states) {
		return s
	}
	st := &c.states[id]
	if s.Port = st.acked; s.Port != nil {
		s.Since = c.start.Add(st.at)
	}
	if f, failed := c.failures[id]; failed && f.of.Key == k {
		s.Err, s.WaitingSince = f.err, c.start.Add(time.Duration(f.since))
	} else if diff(st.acked, c.desired(id)) != 0 {
		s.WaitingSince = c.start.Add(time.Duration(st.since))
	}
	return s
}

// find returns the ID of a Service that is live or that a backend may have, or 0.
func (e *Engine) find(k tracker.Key) uint32 {
	for _, id := range e.names[k.NamespacedName] {
		if e.slots[id].port.Key == k {
			return id
		}
	}
	return e.gone[k]
}

// noteFailure records why a change of the wanted version is not in effect.
func (c *Cursor) noteFailure(ch *Change, err error) {
	f, again := c.failures[ch.ID()]
	if !again || f.of.Key != ch.Key {
		f.since = c.states[ch.ID()].since
	}
	f.err = err
	if f.of = ch.New; f.of == nil {
		for s := range ch.Before() {
			f.of = s
		}
	}
	if c.failures == nil {
		c.failures = map[uint32]failure{}
	}
	c.failures[ch.ID()] = f
}

// reason returns why ch is not in effect after an Apply that returned err.
func (o *outcome) reason(ch *Change, err error) error {
	if !o.some {
		return err
	}
	if own := o.failed[ch.Key]; own != nil {
		return own
	}
	for _, m := range ch.lost {
		if cause, failed := o.failed[m.key]; failed && cause != nil {
			return fmt.Errorf("a frontend moves to %s: %w", m.key, cause)
		} else if o.left[m.key] != nil {
			return fmt.Errorf("a frontend moves to %s: %w", m.key, ErrRefused)
		}
	}
	return err
}
