package driver

import (
	"errors"
	"fmt"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// outcomes is what became of the changes of a delta.
type outcomes struct {
	failed map[tracker.Key]error
	// left holds the Services, besides refused ones, that stay as they were because they lose
	// a frontend to a refused one or to one of these.
	left map[tracker.Key]bool
	// wrote holds, by change, whether something of it may have been written.
	wrote []bool
}

// fail records that a change failed. It returns true if the plane refused it. A Service of which
// something was written is not refused, whatever its error.
func (o *outcomes) fail(c *ruleset.Change, err error, wrote bool) (refused bool) {
	if refused = errors.Is(err, ruleset.ErrRefused); refused && (wrote || c.New == nil) {
		err, refused = fmt.Errorf("half written: %v", err), false
	}
	if o.failed == nil {
		o.failed = map[tracker.Key]error{}
	}
	o.failed[c.Key] = err
	return refused
}

// isLeft reports whether a Service stays as it was.
func (o *outcomes) isLeft(k tracker.Key) bool {
	return o.left[k] || errors.Is(o.failed[k], ruleset.ErrRefused)
}

// leave records the Services that lose a frontend to one that stays as it was, and calls leaves for
// them. Those of which something was written fail.
func (o *outcomes) leave(changes []ruleset.Change, leaves func(*ruleset.Change)) {
	for more := true; more; {
		more = false
		for i := range changes {
			c := &changes[i]
			if o.failed[c.Key] != nil || o.left[c.Key] {
				continue
			}
			for _, to := range c.LostFrontends() {
				if !o.isLeft(to) {
					continue
				}
				if o.wrote[i] {
					o.fail(c, fmt.Errorf("a frontend stays until %s can have it", to), true)
					break
				}
				if o.left == nil {
					o.left = map[tracker.Key]bool{}
				}
				o.left[c.Key], more = true, true
				leaves(c)
				break
			}
		}
	}
}

// waits reports whether a Service loses a frontend to one that failed. Until its new owner is
// in place, the Service serves the frontend's clients.
func (o *outcomes) waits(c *ruleset.Change) bool {
	for _, to := range c.LostFrontends() {
		if o.failed[to] != nil || o.left[to] {
			return true
		}
	}
	return false
}
