package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// counted lists the counters that IPVS has.
const counted = dataplane.CountsConnections | dataplane.CountsPackets | dataplane.CountsBytes

// Traffic reads the kernel's statistics of the virtual servers, which the kernel sums up every
// two seconds (net/netfilter/ipvs/ip_vs_est.c). Known is connections, packets and bytes. IPVS
// does not count refused and dropped packets by Service. A virtual server keeps its statistics
// while its Service and endpoints change, and when another process takes over.
//
// Traffic returns counters by Service port once a full delta was applied. Before, it returns the
// counters of the function [Traffic], by destination. The error is ctx's, [os.ErrClosed], or that
// of reading from the kernel.
func (b *Backend) Traffic(ctx context.Context) (out *dataplane.Traffic, err error) {
	err = b.do(ctx, func() error {
		if b.states == nil {
			out, err = b.unnamedTraffic(ctx)
			return err
		}
		out = &dataplane.Traffic{Known: counted, Services: map[tracker.Key]dataplane.Counters{}}
		for _, s := range b.states {
			stats, err := b.kernel.statistics(s.family)
			if err != nil {
				return fmt.Errorf("ipvs: cannot read traffic: %w", err)
			}
			for k, c := range stats {
				if v := s.virtuals[k]; v != nil && s.servers.Users(k) != 0 {
					total := out.Services[v.service]
					total.Add(c)
					out.Services[v.service] = total
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
// [dataplane.Traffic] Unnamed, by destination. Internal traffic with a virtual server of its own
// counts for one of the Service's destinations. Virtual servers of other programs are included,
// except those in ExcludeCIDRs.
//
// The error wraps [dataplane.ErrNoRules] if the dummy device is missing.
func Traffic(ctx context.Context, c Config) (*dataplane.Traffic, error) {
	b, err := inspect(ctx, c, "read traffic")
	if err != nil {
		return nil, err
	}
	defer b.kernel.close()
	return b.unnamedTraffic(ctx)
}

// unnamedTraffic returns the counters of all virtual servers by destination.
func (b *Backend) unnamedTraffic(ctx context.Context) (*dataplane.Traffic, error) {
	out := &dataplane.Traffic{Known: counted, Unnamed: map[dataplane.Destination]dataplane.Counters{}}
	for _, f := range b.config.Families {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		stats, err := b.kernel.statistics(f)
		var marks map[uint32]dataplane.Destination
		if err == nil {
			marks, err = b.markedDestinations(f)
		}
		if err != nil {
			return nil, fmt.Errorf("ipvs: cannot read traffic: %w", err)
		}
		for k, c := range stats {
			to, known := dataplane.Destination{Addr: k.at, Protocol: inet.ProtocolOf(k.proto)}, true
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
func (b *Backend) markedDestinations(f tracker.Family) (map[uint32]dataplane.Destination, error) {
	out := map[uint32]dataplane.Destination{}
	err := b.kernel.listSet(setShortCircuit, f, func(e entry, mark uint32) {
		to := dataplane.Destination{Addr: netip.AddrPortFrom(e.addr, e.port), Protocol: inet.ProtocolOf(e.proto)}
		if first, ok := out[mark]; !ok || to.Addr.Compare(first.Addr) < 0 {
			out[mark] = to
		}
	})
	if errors.Is(err, syscall.ENOENT) {
		err = nil // kube-proxy has no such set
	}
	return out, err
}
