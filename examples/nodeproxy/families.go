package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/tracker"
)

// hasIPv6 reports whether the calling thread's namespace has IPv6. The kernel must have it,
// not be booted with ipv6.disable=1, and have 0 in net.ipv6.conf.all.disable_ipv6.
func hasIPv6() bool {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); err != nil {
		return false
	}
	disabled, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err != nil || strings.TrimSpace(string(disabled)) == "0"
}

// servedFamilies returns the address families that the node can serve: both, unless the
// system lacks one. It returns an error if the family of --bind-address cannot be served.
func servedFamilies(ctx context.Context, m mode, c *config.Config, ipv6 bool, log *slog.Logger) ([]tracker.Family, error) {
	both := []tracker.Family{tracker.IPv4, tracker.IPv6}
	// A probe can take 20 ms, because the kernel waits when its socket is closed.
	if ipv6 && m.probe(ctx, settings{Config: c, families: both}) == nil {
		return both, nil
	}
	var out []tracker.Family
	lacking := map[tracker.Family]error{}
	for _, f := range both {
		err := m.probe(ctx, settings{Config: c, families: []tracker.Family{f}})
		if f == tracker.IPv6 && !ipv6 {
			err = errors.New("the kernel has no IPv6, or net.ipv6.conf.all.disable_ipv6 turns it off")
		}
		if err == nil {
			out = append(out, f)
			continue
		}
		if tracker.FamilyOf(c.BindAddress) == f {
			return nil, fmt.Errorf("%v cannot be served, but the node's address %v requires it: %w", f, c.BindAddress, err)
		}
		lacking[f] = err
	}
	if len(out) == 0 {
		// Usually the same feature is missing for both families.
		return nil, fmt.Errorf("mode %s: %w", m.name, lacking[tracker.IPv4])
	}
	for f, err := range lacking {
		log.Warn("this node cannot serve an address family", "family", f, "error", err)
	}
	return out, nil
}
