package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Lookup finds the virtual server that handles the packet of q, and returns its real servers that get new
// connections. [dataplane.Found.Where] is the virtual server and its scheduler. The virtual server may be a
// [Backend]'s or kube-proxy's. IPVS does not store the name of the Service.
//
// The error wraps [dataplane.ErrNoRules] if the dummy device is missing. It is a [*dataplane.DriftError] if the
// virtual server exists but no device has its address. Lookup is a debugging aid: it reads without a snapshot, so a
// concurrent change can yield an inconsistent result.
func Lookup(ctx context.Context, c Config, q dataplane.Query) (dataplane.Found, error) {
	to := netip.AddrPortFrom(q.Packet.To.Addr().Unmap(), q.Packet.To.Port())
	k := virtualKey{family: tracker.FamilyOf(to.Addr()), proto: inet.Protocol(q.Packet.Protocol), at: to}
	c.Families = []tracker.Family{k.family}
	b, err := inspect(ctx, c, "look up "+k.String())
	if err != nil {
		return dataplane.Found{}, err
	}
	defer b.kernel.close()
	found, err := b.lookup(k, q.Internal)
	if err != nil {
		return dataplane.Found{}, fmt.Errorf("ipvs: cannot look up %s: %w", k, err)
	}
	return found, nil
}

func inspect(ctx context.Context, c Config, what string) (*Backend, error) {
	b, err := openBackend(ctx, c, toInspect)
	if errors.Is(err, dataplane.ErrNoRules) {
		err = fmt.Errorf("ipvs: cannot %s: %w", what, err)
	}
	return b, err
}

// lookup finds the virtual server with a key. If internal is set and internal traffic to
// the same address and port has its own virtual server, it finds that one.
func (b *Backend) lookup(k virtualKey, internal bool) (found dataplane.Found, err error) {
	where := "virtual server " + k.String()
	server := k
	if internal {
		_, mark, err := b.find(entry{set: setShortCircuit, family: k.family, addr: k.at.Addr(), proto: k.proto, port: k.at.Port()})
		if err != nil {
			return found, err
		}
		if mark != 0 {
			server = virtualKey{family: k.family, mark: mark}
			where = fmt.Sprintf("virtual server %s, for internal traffic to %s", server, k)
		}
	}
	err = b.kernel.virtuals(k.family, func(have virtualKey, v virtual) {
		if have == server {
			found.Entry, found.Where = true, fmt.Sprintf("%s, scheduler %s", where, v.scheduler)
		}
	})
	if err == nil && !found.Entry {
		want := entry{set: setNoEndpoints, family: k.family, addr: k.at.Addr(), proto: k.proto, port: k.at.Port()}
		if found.Entry, _, err = b.find(want); found.Entry {
			found.Where = "set " + setNoEndpoints.name(k.family) + ", which refuses connections"
		}
		return found, err
	}
	if err != nil {
		return found, err
	}
	local := false
	note := func(a netip.Addr) { local = local || a == k.at.Addr() }
	if err := b.kernel.addresses(k.family, note, note); err != nil {
		return found, err
	}
	if !local {
		return found, &dataplane.DriftError{Backend: "ipvs", Family: k.family, What: fmt.Sprintf("virtual server %s exists, but %v is bound to no device", server, k.at.Addr())}
	}
	how := ForwardingTranslated
	err = b.kernel.reals(server, func(r real) {
		if r.weight > 0 { // the others drain
			how = r.forwarding
			found.Endpoints = append(found.Endpoints, r.at)
		}
	})
	if how != ForwardingTranslated {
		found.Where += ", " + how.String()
	}
	slices.SortFunc(found.Endpoints, netip.AddrPort.Compare)
	return found, err
}

// find reports whether a set has an element, and returns its packet mark.
func (b *Backend) find(want entry) (ok bool, mark uint32, err error) {
	err = b.kernel.listSet(want.set, want.family, func(e entry, m uint32) {
		if e == want {
			ok, mark = true, m
		}
	})
	if errors.Is(err, syscall.ENOENT) {
		err = nil // kube-proxy has no such set
	}
	return ok, mark, err
}
