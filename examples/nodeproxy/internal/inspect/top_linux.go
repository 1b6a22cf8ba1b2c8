package inspect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// readTraffic reads the counters in the kernel, with the connections that --socket-lb translated, if it is in effect and
// its maps may be read.
func readTraffic(ctx context.Context, mode string) (s sample, err error) {
	var t *dataplane.Traffic
	switch mode {
	case config.ModeNFTables:
		if t, err = nftables.Traffic(ctx, nftables.Config{}); err == nil {
			s.ready, err = nftables.Ready(ctx, nftables.Config{})
		}
	case config.ModeIPTables:
		t, err = iptables.Traffic(ctx, iptables.Config{Flavor: modes.FlavorInUse(ctx)})
	case config.ModeIPVS:
		t, err = ipvs.Traffic(ctx, ipvs.Config{})
	case config.ModeUserspace:
		return s, errInProcess
	default:
		err = fmt.Errorf("--proxy-mode %s has no counters", mode)
	}
	switch {
	case errors.Is(err, dataplane.ErrNoRules):
		return s, fmt.Errorf("mode %s has no rules in this network namespace: %w", mode, err)
	case errors.Is(err, fs.ErrPermission):
		return s, fmt.Errorf("cannot read the counters of mode %s without CAP_NET_ADMIN in this network namespace; run top as root: %w", mode, err)
	case err != nil:
		return s, err
	case t.Known == 0:
		return s, fmt.Errorf("the rules of mode %s have no counters: an earlier version of the agent wrote them", mode)
	}
	services := slices.Concat(slices.Collect(maps.Keys(s.ready)), slices.Collect(maps.Keys(t.Services)))
	sockets, err := socketlb.Traffic(ctx, socketlb.Config{}, slices.Values(services))
	switch {
	case err == nil:
		modes.AddTraffic(t, sockets)
	case !errors.Is(err, dataplane.ErrNoRules) && !errors.Is(err, fs.ErrPermission):
		return s, err
	}
	s.at, s.known = time.Now(), t.Known
	s.counters = map[rowName]dataplane.Counters{}
	for k, c := range t.Services {
		s.counters[nameOf(k)] = c
	}
	for d, c := range t.Unnamed {
		family := tracker.FamilyOf(d.Addr.Addr())
		s.counters[rowName{Service: d.Addr.String(), Protocol: string(d.Protocol), Family: family.String()}] = c
	}
	return s, nil
}

// errInProcess is what verbs report that read the kernel's rules or counters, in mode
// userspace.
var errInProcess = errors.New("mode userspace has no rules and counters in the kernel: the agent's process serves the Services, and counts with --service-traffic-metrics")
