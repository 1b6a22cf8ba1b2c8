package ruleset

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// Status is what a [Cursor] knows of one Service port.
type Status struct {
	// Port is the version in effect, nil for none: the result of [Cursor.Port].
	Port *Port
	// Since is the time at which the backend acknowledged Port, zero if Port is nil.
	Since time.Time
	// Err is the error of the last attempt to bring another version into effect, nil if it succeeded or there was
	// none.
	Err error
	// WaitingSince is the time at which the Engine compiled the first version that is not in effect, or removed the
	// Service. It is zero if the backend has what it should have.
	WaitingSince time.Time
}

// Status returns what is in effect of a Service port, since when, and what holds up the wanted version. Changes that
// neither a [Cursor.Sync] nor a [Engine.Snapshot] has taken from the tracker do not count. The result for an unknown
// key is the zero value.
//
// A Cursor stores 8 bytes for each Service, and for one that failed some 50 bytes and the backend's error. A tenant
// can have a [Port] with an error for each Service port, so backends should return short errors.
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
	if f, failed := c.failures[id]; failed {
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

// reason returns why c is not in effect after an Apply that returned err.
func (c *Change) reason(err error) error {
	var p *PartialError
	if !errors.As(err, &p) || errors.Is(err, ErrNeedFull) {
		return err
	}
	if own := p.Failed[c.Key]; own != nil {
		return own
	}
	for _, m := range c.lost {
		if cause := p.Failed[m.key]; cause != nil {
			return fmt.Errorf("a frontend moves to %s: %w", m.key, cause)
		}
	}
	return err
}
