package ipvs

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
)

// adoptFailed makes failed items claim the objects in their plans that the kernel has.
// These objects stay as they are, even if another Service port gives them up.
func (u *update) adoptFailed(context.Context) error {
	restricted := map[entry]owner{}
	for _, it := range u.items {
		if u.failed[it.key] == nil {
			continue
		}
		for i := range it.plan.virtuals {
			p := &it.plan.virtuals[i]
			v := u.s.virtuals[p.key]
			if v == nil {
				continue
			}
			if u.s.servers.Users(p.key) == 0 {
				v.service, v.proto = it.key, p.proto
			}
			u.s.servers.Claim(it.owner, p.key)
		}
		for _, a := range it.plan.bind {
			if u.s.bound.Has(a) {
				u.s.bound.Claim(it.owner, a)
			}
		}
		for _, e := range it.plan.entries {
			if u.s.entries.Has(e) {
				u.s.entries.Claim(it.owner, e)
			}
		}
		// Internal traffic keeps its virtual server, even of the Service port that gives up
		// the frontend.
		for i := range it.plan.virtuals {
			at := it.plan.virtuals[i].key.at
			// So does the restriction to source ranges of that port: the virtual server has
			// its endpoints.
			only := entry{set: setLoadBalancerFW, family: u.s.family, addr: at.Addr(), proto: inet.Protocol(it.key.Protocol), port: at.Port()}
			if at.IsValid() && u.s.entries.Has(only) {
				u.s.entries.Claim(it.owner, only)
				restricted[only] = it.owner
			}
			e := entry{set: setShortCircuit, family: u.s.family, addr: at.Addr(), proto: inet.Protocol(it.key.Protocol), port: at.Port()}
			if !at.IsValid() || !u.s.entries.Has(e) {
				continue
			}
			u.s.entries.Claim(it.owner, e)
			if k := (virtualKey{family: u.s.family, mark: u.s.entryMarks[e]}); k.mark != it.plan.mark && u.s.virtuals[k] != nil {
				u.s.servers.Claim(it.owner, k)
				u.held[k] = true
			}
		}
	}
	if len(restricted) == 0 {
		return nil
	}
	for _, it := range u.items {
		for _, e := range slices.Collect(u.s.entries.Items(it.owner)) {
			if !isSource(e) {
				continue
			}
			if o, ok := restricted[restriction(e)]; ok {
				u.s.entries.Claim(o, e)
			}
		}
	}
	return nil
}

// prune retires the virtual servers of a Backend that no Service port needs, and stops
// tracking those of other programs.
func (u *update) prune(context.Context) error {
	for k := range u.s.servers.Unused() {
		if !u.s.recognized(u.b.config, k) {
			delete(u.s.virtuals, k)
			delete(u.s.drainingReals, k)
			u.s.servers.Removed(k)
			continue
		}
		if err := u.retire(k); errors.Is(err, ruleset.ErrNeedFull) {
			return err
		} else if err != nil {
			u.stale = append(u.stale, fmt.Errorf("prune: %w", err))
			// The next full delta must recognize it.
			if e, ok := u.s.identity(k); ok && u.s.entries.Has(e) {
				u.s.entries.Claim(owner(0), e)
			}
		}
	}
	return nil
}
