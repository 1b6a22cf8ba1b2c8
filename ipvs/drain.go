//go:build linux

package ipvs

import (
	"time"

	"github.com/go-proxier/proxier/internal/inet"
)

// A real server is in one of three phases. It is absent until an endpoint asks for
// it and serving until none does any more. Then it drains: it has weight 0, so that
// IPVS sends it the packets of the connections it has and no new ones, until it is
// seen to have none or its time is up.
//
//	        wanted              unwanted
//	absent --------> serving -------------> draining
//	   ^                ^                    |    |
//	   |                +--------------------+    |
//	   |                        wanted            |
//	   +------------------------------------------+
//	                      drained
//
// One that is wanted again while it drains gets its weight back: it was never away.
// A real server with weight 0 that an earlier process left is found draining. That
// is all there is to remember, so a restart loses nothing but the time it began.
type phase uint8

const (
	absent phase = iota
	serving
	draining
)

// event is what happens to a real server.
type event uint8

const (
	// wanted: an endpoint is there, or is there again.
	wanted event = iota
	// unwanted: no endpoint is there any more.
	unwanted
	// drained: it has no connections left, or has had its time.
	drained
)

// action is what is to be done in the kernel.
type action uint8

const (
	nothing action = iota
	// create adds it with the endpoint's weight.
	create
	// restore gives it the endpoint's weight.
	restore
	// quiesce sets its weight to 0.
	quiesce
	// remove deletes it, and what connections it has with it.
	remove
)

// next is the state machine.
func (p phase) next(e event) (phase, action) {
	switch {
	case e == wanted && p == absent:
		return serving, create
	case e == wanted:
		return serving, restore
	case e == unwanted && p == serving:
		return draining, quiesce
	case e == drained && p == draining:
		return absent, remove
	}
	return p, nothing
}

// linger is how long a real server drains whose protocol is not to: long enough for
// an answer that is on its way, which would come from the endpoint's own address if
// the real server were gone.
const linger = time.Second

// rule says when a real server that drains is drained.
type rule struct {
	// counts: it is as soon as it has no connections.
	counts bool
	// limit: it is after that time, if not 0.
	limit time.Duration
}

// rule returns what holds for a protocol.
func (d Drain) rule(proto uint8) rule {
	for _, p := range d.Gracefully {
		if inet.Protocol(p) == proto {
			return rule{counts: true, limit: d.Limit}
		}
	}
	return rule{limit: linger}
}

// over reports whether the time is up.
func (r rule) over(since, now time.Time) bool { return r.limit > 0 && now.Sub(since) >= r.limit }

// idle reports whether the numbers of active and inactive connections say that it
// is drained.
func (r rule) idle(active, inactive int) bool { return r.counts && active == 0 && inactive == 0 }
