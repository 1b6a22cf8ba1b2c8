package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A real server serves while a Service has its endpoint. Then it drains with weight 0, until it has no connection
// left or the limit has passed. If the endpoint returns, the real server gets its weight back. A real server with
// weight 0 that an earlier process left counts as draining, so a restart loses only the time at which the drain
// began.

// serve adds a real server to a virtual server, or gives it the weight.
func (u *update) serve(k virtualKey, v *virtualState, at netip.AddrPort, weight uint16) error {
	old, exists := v.reals[at]
	var err error
	switch {
	case !exists:
		err = u.b.kernel.addReal(k, real{at: at, weight: weight, forwarding: v.forwarding})
	case old != weight:
		err = u.b.kernel.setReal(k, real{at: at, weight: weight, forwarding: v.forwarding})
	}
	if err != nil {
		if !errors.Is(err, syscall.EINVAL) {
			v.unsure()
		}
		return err
	}
	v.reals[at] = weight
	u.s.endDrain(k, at)
	return nil
}

// quiesce begins to drain a real server unless it drains already.
func (u *update) quiesce(k virtualKey, v *virtualState, at netip.AddrPort) error {
	if v.reals[at] != 0 {
		if err := u.b.kernel.setReal(k, real{at: at, forwarding: v.forwarding}); err != nil {
			v.unsure()
			return err
		}
	}
	v.reals[at] = 0
	u.s.startDrain(k, at, u.now)
	return nil
}

// retireLimit is the limit of a retired virtual server, unless [Config].DrainLimit is set: it keeps an
// address and port from others.
const retireLimit = 15 * time.Minute

// answerTime is how long a real server of a protocol without graceful termination drains, because without it an
// answer on its way would come from the endpoint's own address.
const answerTime = time.Second

// drainRule decides when a draining real server is drained.
type drainRule struct {
	// counts means as soon as it has no connections.
	counts bool
	// limit, unless it is 0, means after this time.
	limit time.Duration
}

func (c Config) drainRule(proto uint8) drainRule {
	if proto == inet.Protocol(v1.ProtocolTCP) {
		return drainRule{counts: true, limit: c.DrainLimit}
	}
	return drainRule{limit: answerTime}
}

func (r drainRule) over(since, now time.Time) bool { return r.limit > 0 && now.Sub(since) >= r.limit }

// unused reports whether a real server with these connections is drained.
func (r drainRule) unused(active, inactive int) bool { return r.counts && active == 0 && inactive == 0 }

// inUse returns the addresses and ports of retired virtual servers, or of the real servers of those with a mark, each
// with whether it has a TCP connection that has not ended. IPVS counts ended connections for minutes as inactive.
// Connection tracking knows the translated ones. inUse returns nil if it cannot read these, or has just read them: it
// takes at most a fiftieth of the time.
func (b *Backend) inUse(s *state) map[netip.AddrPort]bool {
	start := time.Now()
	if start.Before(s.nextLook) {
		return nil
	}
	out := map[netip.AddrPort]bool{}
	for k := range s.retired {
		if out[k.at] = false; k.mark != 0 {
			for at := range s.virtuals[k].reals {
				out[at] = false
			}
		}
	}
	err := b.kernel.connections(s.family, func(addrs ...netip.AddrPort) {
		for _, a := range addrs {
			if _, ok := out[a]; ok {
				out[a] = true
			}
		}
	})
	s.nextLook = time.Now().Add(49 * time.Since(start))
	if err != nil {
		b.config.Log.Debug("ipvs: cannot read connection tracking, ended connections count until IPVS forgets them", slog.Any("error", err))
		return nil
	}
	return out
}

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

func (s *state) endDrain(k virtualKey, at netip.AddrPort) {
	if m := s.drainingReals[k]; m != nil {
		delete(m, at)
		if len(m) == 0 {
			delete(s.drainingReals, k)
		}
	}
}

// Retire deletes real servers that have drained, and returns the number of those that still drain. After a full delta
// without Services, 0 means that [Cleanup] ends no connection. Before the first full delta, Retire does nothing and
// returns 0.
//
// Like [Backend.Watch], which calls it every second, Retire updates NodePorts if the node's addresses have changed.
// It makes one request for each virtual server with a draining real server.
//
// The error wraps [ruleset.ErrNeedFull] if an object that was in the kernel is missing. It is a
// [*ruleset.PartialError] if NodePorts of some Services could not be updated; the next call tries again. After
// another error the caller calls Retire again.
func (b *Backend) Retire(ctx context.Context) (draining int, err error) {
	err = b.tend(ctx, time.Now())
	return b.draining(), err
}

func (b *Backend) draining() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.states {
		for _, reals := range s.drainingReals {
			n += len(reals)
		}
	}
	return n
}

// tend does what Retire does. now is the time against which [Config].DrainLimit is measured.
func (b *Backend) tend(ctx context.Context, now time.Time) error {
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
				u.addStale()
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

// drain deletes real servers that have drained, and with the last one virtual servers that are retired or whose
// Service has no endpoints. If onlyTime is set, it looks at limits and not at connections.
func (b *Backend) drain(s *state, now time.Time, onlyTime bool) error {
	u, released := newUpdate(b, s, nil), false
	inUse := sync.OnceValue(func() map[netip.AddrPort]bool { return b.inUse(s) })
	keys := slices.Collect(maps.Keys(s.drainingReals))
	if !onlyTime {
		slices.SortFunc(keys, virtualKey.compare)
	}
	for _, k := range keys {
		v, since := s.virtuals[k], s.drainingReals[k]
		rule := b.config.drainRule(v.proto)
		retired := s.keeps(k)
		if retired && rule.counts {
			rule.limit = cmp.Or(rule.limit, retireLimit)
		}
		ended := func(r real) bool { // although IPVS still has its connections
			if !retired || r.active != 0 || r.inactive == 0 || r.forwarding != ForwardingTranslated {
				return false
			}
			at := k.at
			if k.mark != 0 {
				at = r.at
			}
			open, known := inUse()[at]
			return known && !open
		}
		var done []netip.AddrPort
		for at, t := range since {
			if rule.over(t, now) {
				done = append(done, at)
			}
		}
		if rule.counts && !onlyTime && len(done) < len(since) {
			err := b.kernel.reals(k, func(r real) {
				if t, ok := since[r.at]; ok && !rule.over(t, now) && (rule.unused(r.active, r.inactive) || ended(r)) {
					done = append(done, r.at)
				}
			})
			if err != nil {
				return err
			}
		}
		slices.SortFunc(done, netip.AddrPort.Compare)
		for _, at := range done {
			if err := b.kernel.delReal(k, at); err != nil {
				return err
			}
			delete(v.reals, at)
			s.endDrain(k, at)
		}
		if (retired || v.rejected) && len(v.reals) == 0 {
			if err := u.deleteVirtual(k); err != nil {
				return err
			}
			released = true
		}
	}
	if !released {
		return nil
	}
	if err := u.unbind(context.Background()); err != nil {
		return err
	}
	return u.deleteUnused(isAny)
}

// retired holds the objects that a virtual server without a Service port keeps for its
// connections.
type retired struct {
	owner   owner
	entries []entry
	bound   netip.Addr
}

// retire deletes a virtual server that no Service port owns: immediately or, if its protocol drains and it has
// connections, when these have ended. Until then, a closed port of a cluster IP or of the node refuses new
// connections, and an address that no host has does not answer.
func (u *update) retire(k virtualKey) error {
	v := u.s.virtuals[k]
	if v == nil || !u.b.config.drainRule(v.proto).counts {
		return u.deleteVirtual(k) // without v, the write that added it failed
	}
	busy := false
	err := u.b.kernel.reals(k, func(r real) { busy = busy || r.active != 0 || r.inactive != 0 })
	switch {
	case errors.Is(err, syscall.ESRCH):
		return u.deleteVirtual(k)
	case err != nil:
		return err
	case busy:
		return u.keepRetired(k, v)
	}
	return u.deleteVirtual(k)
}

// keepRetired keeps a retired virtual server until it has drained, with the address and
// the set elements that its connections need.
func (u *update) keepRetired(k virtualKey, v *virtualState) error {
	if err := u.reread(k, v); err != nil {
		return err
	}
	for _, at := range slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare) {
		if err := u.quiesce(k, v, at); err != nil {
			return err
		}
	}
	if u.s.keeps(k) {
		return nil
	}
	if last := u.s.before; last == nil || !last.keeps(k) {
		for at := range v.reals {
			u.s.drainingReals[k][at] = u.now // the limit counts from here
		}
	}
	var r retired
	if k.mark == 0 {
		r = u.s.retirement(k)
	}
	u.s.lastRetired = max(u.s.lastRetired+1, firstRetired)
	r.owner = u.s.lastRetired
	u.s.retired[k] = r
	err := u.claim(r)
	if err != nil {
		u.release(k)
	}
	return err
}

func (s *state) keeps(k virtualKey) bool { _, ok := s.retired[k]; return ok }

func (u *update) claim(r retired) error {
	if r.bound.IsValid() {
		if err := u.claimAddress(r.owner, r.bound); err != nil {
			return err
		}
	}
	for _, e := range r.entries {
		if !u.s.entries.Claim(r.owner, e) {
			continue
		}
		if err := u.b.kernel.addEntries(e.set, u.s.family, []entry{e}, nil); err != nil {
			return err
		}
		u.s.hasEntry(e, 0)
	}
	return nil
}

// retirement returns the objects that a virtual server needs until it has drained: the element by which it is
// recognized, its address if it is or was bound, and the elements that stop new connections.
func (s *state) retirement(k virtualKey) (r retired) {
	identity, cluster := s.identity(k)
	if cluster {
		r.entries = append(r.entries, identity)
		cluster = identity.set == setClusterIP
	}
	a := k.at.Addr()
	ips := entry{set: setIPs, family: k.family, addr: a}
	if !s.bound.Has(a) && (s.own[a] || !s.knows(ips)) {
		return r
	}
	services := s.bound.Users(a)
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

func (u *update) releaseOwned(context.Context) error {
	for k := range u.s.retired {
		if u.s.servers.Users(k) != 0 {
			u.release(k)
		}
	}
	return nil
}

func (u *update) release(k virtualKey) {
	r, ok := u.s.retired[k]
	if !ok {
		return
	}
	delete(u.s.retired, k)
	for _, e := range r.entries {
		u.s.entries.Release(r.owner, e)
	}
	if r.bound.IsValid() {
		u.s.bound.Release(r.owner, r.bound)
	}
}
