package ipvs

import (
	"context"
	"errors"
	"net/netip"

	"github.com/go-proxier/proxier/ruleset"
)

// keepFailed makes failed items claim what the kernel has at the frontends in their plans, even if another Service
// port gives up the frontend: its real servers serve until those of the item can be added. So they keep their source
// ranges and their virtual server of internal traffic.
func (u *update) keepFailed(context.Context) error {
	owners := map[virtualKey]owner{}
	for _, it := range u.items {
		if !it.failed {
			continue
		}
		for i := range it.plan.virtuals {
			owners[it.plan.virtuals[i].key] = it.owner
		}
	}
	if len(owners) == 0 {
		return nil
	}
	claim := func(e entry) {
		o, ok := owners[virtualKey{family: e.family, proto: e.proto, at: netip.AddrPortFrom(e.addr, e.port)}]
		if !ok {
			return
		}
		u.s.entries.Claim(o, e)
		if k := (virtualKey{family: e.family, mark: u.s.entryMarks[e]}); u.s.virtuals[k] != nil {
			u.s.servers.Claim(o, k)
		}
	}
	for e := range u.s.entries.All() {
		claim(e)
	}
	for e := range u.s.entryMarks { // those of which the last write failed are not in All
		claim(e)
	}
	return nil
}

// prune retires the virtual servers of a Backend that no Service port needs, and stops tracking those of other
// programs. If one stays, the error ends the update, so that the set elements by which the next full delta recognizes
// it stay.
func (u *update) prune(context.Context) (failed error) {
	for k := range u.s.servers.Unused() {
		if v := u.s.virtuals[k]; v != nil && !u.s.recognized(u.b.config, k, v.virtual) {
			delete(u.s.virtuals, k)
			delete(u.s.drainingReals, k)
			u.s.servers.Removed(k)
		} else if err := u.retire(k); errors.Is(err, ruleset.ErrNeedFull) {
			return err
		} else if err != nil {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}
