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
		// A machine with Windows starts its services, and the network plugin makes the network, in any order.
		if !errors.Is(err, winkernel.ErrNotRunning) && !errors.Is(err, winkernel.ErrNoNetwork) {
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

func servedFamilies(ctx context.Context, m Mode, s Settings, ipv6 bool, log *slog.Logger) (out []tracker.Family, err error) {
	lacking := map[tracker.Family]error{}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		s.Families = []tracker.Family{f}
		if f == tracker.IPv6 && !ipv6 {
			err = fmt.Errorf("%w: the kernel has no IPv6, or net.ipv6.conf.all.disable_ipv6 turns it off", dataplane.ErrUnsupported)
		} else {
			err = m.Probe(ctx, s)
		}
		switch {
		case err == nil:
			out = append(out, f)
			continue
		case !errors.Is(err, dataplane.ErrUnsupported) && !errors.Is(err, ruleset.ErrConfig):
			return nil, fmt.Errorf("mode %s: %w", m.Name, err)
		case tracker.FamilyOf(s.BindAddress) == f:
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
