package modes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// ServedFamilies returns the address families that the node can serve: both, unless the
// system lacks one. It returns an error if the family of --bind-address cannot be served. It also
// returns the error of a probe that does not report what the system lacks, because the family may
// work at the next start. It waits while an error may pass.
func ServedFamilies(ctx context.Context, m Mode, s Settings, log *slog.Logger) ([]tracker.Family, error) {
	return waitForFamilies(ctx, m, s, HasIPv6(), 2*time.Second, log)
}

// waitForFamilies is ServedFamilies with an interval between tries.
func waitForFamilies(ctx context.Context, m Mode, s Settings, ipv6 bool, interval time.Duration, log *slog.Logger) ([]tracker.Family, error) {
	logged := ""
	for {
		out, err := servedFamilies(ctx, m, s, ipv6, log)
		if err == nil || !mayPass(err) {
			return out, err
		}
		if text := err.Error(); text != logged {
			log.Warn("waiting until the node can be served", "error", err)
			logged = text
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(interval):
		}
	}
}

var errNoIPv6 = fmt.Errorf("%w: the kernel has no IPv6, or net.ipv6.conf.all.disable_ipv6 turns it off", dataplane.ErrUnsupported)

// mayPass reports whether an error of a probe may pass without a change of the configuration. A
// machine with Windows starts its services, and the network plugin makes the network, in any order.
func mayPass(err error) bool {
	return errors.Is(err, winkernel.ErrNotRunning) || errors.Is(err, winkernel.ErrNoNetwork)
}

func servedFamilies(ctx context.Context, m Mode, s Settings, ipv6 bool, log *slog.Logger) ([]tracker.Family, error) {
	both := []tracker.Family{tracker.IPv4, tracker.IPv6}
	probe := func(families ...tracker.Family) error {
		s := s
		s.Families = families
		return m.Probe(ctx, s)
	}
	// A probe can take 20 ms, because the kernel waits when its socket is closed.
	if ipv6 && probe(both...) == nil {
		return both, nil
	}
	var out []tracker.Family
	lacking := map[tracker.Family]error{}
	for _, f := range both {
		err := probe(f)
		if f == tracker.IPv6 && !ipv6 {
			err = errNoIPv6
		}
		if err == nil {
			out = append(out, f)
			continue
		}
		if !errors.Is(err, dataplane.ErrUnsupported) && !errors.Is(err, ruleset.ErrConfig) {
			return nil, fmt.Errorf("mode %s: %w", m.Name, err)
		}
		if tracker.FamilyOf(s.BindAddress) == f {
			return nil, fmt.Errorf("%v cannot be served, but the node's address %v requires it: %w", f, s.BindAddress, err)
		}
		lacking[f] = err
	}
	if len(out) == 0 {
		// Usually the same feature is missing for both families.
		return nil, fmt.Errorf("mode %s: %w", m.Name, lacking[tracker.IPv4])
	}
	for f, err := range lacking {
		log.Warn("this node cannot serve an address family", "family", f, "error", err)
	}
	return out, nil
}
