//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	moby "github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// counted lists the counters that IPVS has.
const counted = ruleset.CountsConnections | ruleset.CountsPackets | ruleset.CountsBytes

// Traffic reads the kernel's statistics of the virtual servers, which the kernel sums up every
// two seconds (net/netfilter/ipvs/ip_vs_est.c). Known is connections, packets and bytes. IPVS
// does not count refused and dropped packets by Service. A virtual server keeps its statistics
// while its Service and endpoints change, and when another process takes over. IPVS reports
// connections, and packets in each direction, in 32 bits, and begins again at 0 beyond that.
//
// Traffic returns counters by Service port once a full delta was applied. Before, it returns the
// counters of the function [Traffic], by destination. The error is ctx's, [os.ErrClosed], or that
// of reading from the kernel.
func (b *Backend) Traffic(ctx context.Context) (out *ruleset.Traffic, err error) {
	err = b.do(ctx, func() error {
		if b.states == nil {
			out, err = b.unnamedTraffic(ctx)
			return err
		}
		out = &ruleset.Traffic{Known: counted, Services: map[tracker.Key]ruleset.Counters{}}
		for _, s := range b.states {
			stats, err := b.kernel.statistics(s.family)
			if err != nil {
				return fmt.Errorf("ipvs: cannot read traffic: %w", err)
			}
			for k, c := range stats {
				if v := s.virtuals[k]; v != nil && v.owner != (tracker.Key{}) {
					total := out.Services[v.owner]
					total.Add(c)
					out.Services[v.owner] = total
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Traffic reads the kernel's statistics of the virtual servers, as [Backend.Traffic] does,
// without a [Backend]. IPVS does not store names of Services, so the counters are in
// [ruleset.Traffic] Unnamed, by destination. Internal traffic with a virtual server of its own
// counts for one of the Service's destinations. Virtual servers of other programs are included,
// except those in ExcludeCIDRs.
//
// The error wraps [ruleset.ErrNoRules] if the dummy device is missing.
func Traffic(ctx context.Context, c Config) (*ruleset.Traffic, error) {
	b, err := openProgrammed(c, "read traffic")
	if err != nil {
		return nil, err
	}
	defer b.close()
	return b.unnamedTraffic(ctx)
}

// unnamedTraffic returns the counters of all virtual servers by destination.
func (b *Backend) unnamedTraffic(ctx context.Context) (*ruleset.Traffic, error) {
	out := &ruleset.Traffic{Known: counted, Unnamed: map[ruleset.Destination]ruleset.Counters{}}
	for _, f := range b.config.Families {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		stats, err := b.kernel.statistics(f)
		var marks map[uint32]ruleset.Destination
		if err == nil {
			marks, err = b.markedDestinations(f)
		}
		if err != nil {
			return nil, fmt.Errorf("ipvs: cannot read traffic: %w", err)
		}
		for k, c := range stats {
			to, known := ruleset.Destination{Addr: k.at, Protocol: inet.ProtocolOf(k.proto)}, true
			if k.mark != 0 {
				to, known = marks[k.mark]
			}
			if !known || b.config.excluded(to.Addr.Addr()) {
				continue
			}
			total := out.Unnamed[to]
			total.Add(c)
			out.Unnamed[to] = total
		}
	}
	return out, nil
}

// markedDestinations returns, for each mark, the first destination whose internal traffic gets
// it.
func (b *Backend) markedDestinations(f tracker.Family) (map[uint32]ruleset.Destination, error) {
	out := map[uint32]ruleset.Destination{}
	err := b.sets.list(setShortCircuit, f, func(e entry, mark uint32) {
		to := ruleset.Destination{Addr: netip.AddrPortFrom(e.addr, e.port), Protocol: inet.ProtocolOf(e.proto)}
		if first, ok := out[mark]; !ok || to.Addr.Compare(first.Addr) < 0 {
			out[mark] = to
		}
	})
	if errors.Is(err, unix.ENOENT) {
		err = nil // kube-proxy has no such set
	}
	return out, err
}

// statistics returns the counters of each virtual server. A list may lack some if others are
// added or deleted at the same time (see virtuals), so it reads two and takes the larger
// counters.
func (k *kernel) statistics(f tracker.Family) (map[virtualKey]ruleset.Counters, error) {
	out := map[virtualKey]ruleset.Counters{}
	for range 2 {
		err := k.services(f, func(key virtualKey, s *moby.Service) {
			c := ruleset.Counters{
				Connections: uint64(s.Stats.Connections),
				Packets:     uint64(s.Stats.PacketsIn) + uint64(s.Stats.PacketsOut),
				Bytes:       s.Stats.BytesIn + s.Stats.BytesOut,
			}
			if c.Packets >= out[key].Packets {
				out[key] = c
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}
