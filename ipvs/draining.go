//go:build linux

package ipvs

import (
	"context"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink/nl"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// A real server serves while a Service has its endpoint. Then it drains: its weight is 0,
// so that IPVS sends it the packets of its connections and no new connections, until it
// has no connection left or the limit has passed. If the endpoint returns while its real
// server drains, the real server gets its weight back. A real server with weight 0 that an
// earlier process left counts as draining, so a restart loses only the time at which the
// drain began.

// serve adds a real server to a virtual server, or gives it the weight.
func (u *update) serve(k virtualKey, v *virtualState, at netip.AddrPort, weight uint16) error {
	old, exists := v.reals[at]
	var err error
	switch {
	case !exists:
		err = u.b.kernel.addReal(k, at, weight)
	case old != weight:
		err = u.b.kernel.setReal(k, at, weight)
	}
	if err != nil {
		return err
	}
	v.reals[at] = weight
	u.s.endDrain(k, at)
	return nil
}

// quiesce begins to drain a real server unless it drains already.
func (u *update) quiesce(k virtualKey, v *virtualState, at netip.AddrPort) error {
	if v.reals[at] != 0 {
		if err := u.b.kernel.setReal(k, at, 0); err != nil {
			return err
		}
	}
	v.reals[at] = 0
	u.s.startDrain(k, at, u.now)
	return nil
}

// answerTime is how long a real server of a protocol without graceful termination
// drains: long enough for an answer that is on its way. Without the real server the
// answer would come from the endpoint's own address.
const answerTime = time.Second

// drainRule decides when a draining real server is drained.
type drainRule struct {
	// counts means as soon as it has no connections.
	counts bool
	// limit, unless it is 0, means after this time.
	limit time.Duration
}

// rule returns the rule for a protocol.
func (d Drain) rule(proto uint8) drainRule {
	for _, p := range d.Gracefully {
		if inet.Protocol(p) == proto {
			return drainRule{counts: true, limit: d.Limit}
		}
	}
	return drainRule{limit: answerTime}
}

// over reports whether the limit has passed.
func (r drainRule) over(since, now time.Time) bool { return r.limit > 0 && now.Sub(since) >= r.limit }

// unused reports whether a real server with these connections is drained.
func (r drainRule) unused(active, inactive int) bool { return r.counts && active == 0 && inactive == 0 }

// startDrain records that a real server drains.
func (s *state) startDrain(k virtualKey, at netip.AddrPort, since time.Time) {
	m := s.drainingReals[k]
	if m == nil {
		m = map[netip.AddrPort]time.Time{}
		s.drainingReals[k] = m
	}
	if _, ok := m[at]; !ok {
		m[at] = since
	}
}

// endDrain records that a real server no longer drains.
func (s *state) endDrain(k virtualKey, at netip.AddrPort) {
	if m := s.drainingReals[k]; m != nil {
		delete(m, at)
		if len(m) == 0 {
			delete(s.drainingReals, k)
		}
	}
}

// Draining returns the number of real servers that drain: they keep their connections and
// get no new ones. It is 0 before the first full delta. After a full delta without
// Services, 0 means that Cleanup ends no connection.
func (b *Backend) Draining() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, s := range b.states {
		for _, reals := range s.drainingReals {
			n += len(reals)
		}
	}
	return n
}

// drain deletes real servers that have drained, and retired virtual servers with their
// last real server. If onlyTime is set, it looks at limits and not at connections.
func (b *Backend) drain(s *state, now time.Time, onlyTime bool) error {
	u := newUpdate(b, s, nil)
	for k, since := range s.drainingReals {
		v := s.virtuals[k]
		rule := b.config.Drain.rule(v.proto)
		var done []netip.AddrPort
		for at, t := range since {
			if rule.over(t, now) {
				done = append(done, at)
			}
		}
		if rule.counts && !onlyTime && len(done) < len(since) {
			err := b.kernel.reals(k, func(r real) {
				if t, ok := since[r.at]; ok && !rule.over(t, now) && rule.unused(r.active, r.inactive) {
					done = append(done, r.at)
				}
			})
			if err != nil {
				return err
			}
		}
		for _, at := range done {
			if err := b.kernel.delReal(k, at); err != nil {
				return err
			}
			delete(v.reals, at)
			s.endDrain(k, at)
		}
		if _, ok := s.retired[k]; ok && len(v.reals) == 0 {
			if err := u.deleteVirtual(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// retired holds the objects that a virtual server without an owner keeps for its
// connections.
type retired struct {
	entries []entry
	bound   netip.Addr
}

// retire deletes a virtual server that no Service port owns: at once or, if its protocol
// drains and it has connections, when the connections have ended. Until then, new
// connections are treated as if the virtual server were gone. A closed port of a cluster
// IP or of the node refuses them, and an address that no host has does not answer.
func (u *update) retire(k virtualKey, v *virtualState) error {
	if u.b.config.Drain.rule(v.proto).counts {
		busy := false
		err := u.b.kernel.reals(k, func(r real) { busy = busy || r.active != 0 || r.inactive != 0 })
		if err != nil {
			return err
		}
		if busy {
			return u.keepRetired(k, v)
		}
	}
	return u.deleteVirtual(k)
}

// keepRetired keeps a retired virtual server until it has drained, with the address and
// the set elements that its connections need.
func (u *update) keepRetired(k virtualKey, v *virtualState) error {
	for at := range v.reals {
		if err := u.quiesce(k, v, at); err != nil {
			return err
		}
	}
	v.owner = tracker.Key{}
	if _, already := u.s.retired[k]; already {
		return nil
	}
	var r retired
	if k.mark == 0 {
		r = u.s.retirement(k)
	}
	if r.bound.IsValid() {
		if err := u.bindOne(r.bound); err != nil {
			return err
		}
		u.s.bound.take(r.bound)
	}
	for _, e := range r.entries {
		if !u.s.entries.has(e) {
			if err := u.b.sets.change(nl.IPSET_CMD_ADD, e.set, k.family, []entry{e}, nil); err != nil {
				return err
			}
		}
		u.s.entries.take(e)
	}
	u.s.retired[k] = r
	return nil
}

// retirement returns the objects that a virtual server needs until it has drained: the
// element by which it is recognised, its address if it is bound, or was before another
// program deleted it, and the elements that stop new connections.
func (s *state) retirement(k virtualKey) (r retired) {
	identity, cluster := s.identity(k)
	if cluster {
		r.entries = append(r.entries, identity)
		cluster = identity.set == setClusterIP
	}
	a := k.at.Addr()
	ips := entry{set: setIPs, family: k.family, addr: a}
	if !s.bound.has(a) && (s.own[a] || !s.knows(ips)) {
		return r
	}
	services := s.bound[a].owners
	for _, other := range s.retired {
		if other.bound == a {
			services--
		}
	}
	r.bound = a
	r.entries = append(r.entries, ips)
	if services == 0 {
		r.entries = append(r.entries, entry{set: setBoundExternal, family: k.family, addr: a})
	}
	if services == 0 || !cluster {
		r.entries = append(r.entries, entry{set: setNoLocal, family: k.family, addr: a, proto: k.proto, port: k.at.Port()})
	}
	return r
}

// releaseOwned ends the retirement of virtual servers that a Service port owns again.
func (u *update) releaseOwned(context.Context) error {
	for k := range u.s.retired {
		if v := u.s.virtuals[k]; v != nil && v.owner != (tracker.Key{}) {
			if err := u.release(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// release removes the ownership of the objects that a retired virtual server kept, after
// it has drained or has an owner again.
func (u *update) release(k virtualKey) error {
	r, ok := u.s.retired[k]
	if !ok {
		return nil
	}
	delete(u.s.retired, k)
	var lists entryLists
	for _, e := range r.entries {
		if u.s.entries.drop(e) {
			lists.add(e)
		}
	}
	if r.bound.IsValid() && u.s.bound.drop(r.bound) {
		if err := u.b.device.unbind(r.bound); err != nil {
			return err
		}
		delete(u.s.bound, r.bound)
	}
	return u.deleteEntries(lists)
}
