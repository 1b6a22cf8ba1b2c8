package modes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// OtherRules returns the kinds of rules in the network namespace of the calling thread, of this agent,
// too: see [takeover.Look].
func OtherRules(ctx context.Context, ownDevice bool, log *slog.Logger) (map[takeover.Kind]uint64, error) {
	legacy, err := legacyKinds(ctx, log)
	if err != nil {
		return nil, err
	}
	return takeover.Look(ctx, legacy, ownDevice)
}

// legacyKinds returns the kinds of rules in iptables-legacy.
func legacyKinds(ctx context.Context, log *slog.Logger) (map[takeover.Kind]bool, error) {
	out := map[takeover.Kind]bool{}
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if !legacyInUse(f) {
			continue
		}
		c := iptables.Config{Flavor: iptables.Legacy, Families: []tracker.Family{f}, Log: log}
		foreign, err := iptables.Foreign(ctx, c)
		owned, err2 := iptables.Owned(ctx, c)
		ipvsOwned, err3 := false, error(nil)
		if takeover.IPVSDevice() != nil { // Owned reads all rules
			ipvsOwned, err3 = ipvs.Owned(ctx, ipvs.Config{IPTables: iptables.Legacy, Families: c.Families, Log: log})
		}
		if err := errors.Join(Missing(err, log), Missing(err2, log), Missing(err3, log)); err != nil {
			return nil, err
		}
		for kind, present := range map[takeover.Kind]bool{
			{Owner: takeover.KubeProxy, Mode: config.ModeIPTables}: foreign,
			{Owner: takeover.Nodeproxy, Mode: config.ModeIPTables}: owned,
			{Owner: takeover.Nodeproxy, Mode: config.ModeIPVS}:     ipvsOwned,
		} {
			out[kind] = out[kind] || present
		}
	}
	return out, nil
}

// sharedWithIPVS are the modes whose objects kube-proxy's mode ipvs uses, too, and what those are.
var sharedWithIPVS = map[string]string{config.ModeIPVS: "virtual servers and sets", config.ModeIPTables: "chains"}

// Cleanable returns the modes whose rules --cleanup may remove. If a kube-proxy runs in mode ipvs, or in
// a mode that is not known, and c does not adopt its rules, it leaves out the modes that share objects
// with mode ipvs and in which the agent has left rules, and returns an error: nothing proves whose those
// objects are. dial connects to a kube-proxy.
func Cleanable(ctx context.Context, modes []Mode, c *config.Config, dial func(ctx context.Context, network, address string) (net.Conn, error), log *slog.Logger) (out []Mode, refused error) {
	p := takeover.Prober{Dial: dial, Runs: takeover.KubeProxyRuns, Trusted: takeover.ListenerIsRoots, Pages: takeover.Pages(c.Effective.MetricsBindAddress, c.Effective.HealthzBindAddress)}
	if c.Adopt || !slices.ContainsFunc(p.Look(ctx), func(k takeover.Kind) bool {
		return k.Owner == takeover.KubeProxy && (k.Mode == config.ModeIPVS || k.Mode == "")
	}) {
		return modes, nil
	}
	device := takeover.IPVSDevice() != nil
	for _, m := range modes {
		if shared := sharedWithIPVS[m.Name]; shared != "" && (device || m.Name == config.ModeIPVS) {
			if owned, err := m.Owned(ctx, log); err == nil && owned {
				refused = errors.Join(refused, fmt.Errorf("rules of mode %s stay: kube-proxy runs, and its mode ipvs uses the same %s; stop it, or run nodeproxy in mode nftables first, which removes them", m.Name, shared))
				continue
			}
		}
		out = append(out, m) // cleaning up reports an error that persists
	}
	return out, refused
}

// drainInterval is how often retireIPVS checks whether connections have ended.
const drainInterval = time.Second

// retireIPVS removes mode ipvs without breaking connections. In other modes connection
// tracking keeps established connections; IPVS keeps them itself. Endpoints get no new
// connections, and everything is removed when the last connection has ended or the limit has
// passed. The connections are those of Services that the new mode serves, so 0 sets no limit.
func retireIPVS(ctx context.Context, m Mode, adopt bool, limit time.Duration, log *slog.Logger) error {
	families := ipvsFamilies(ctx)
	if len(families) == 0 {
		return nil // without IPVS there can be no rules
	}
	if owned, err := m.Owned(ctx, log); err != nil || !owned && !adopt {
		return err
	}
	b, err := ipvs.New(ctx, ipvs.Config{Families: families, Log: log, KeepSysctls: true, DrainLimit: cmp.Or(limit, math.MaxInt64)})
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Apply(ctx, &ruleset.Delta{Full: true, Node: &ruleset.Node{}}); err != nil {
		return err
	}
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for logged := false; ; logged = true {
		n, err := b.Retire(ctx)
		if err != nil {
			return err
		}
		if n == 0 {
			return m.CleanupKubeProxy(ctx, log) // in every flavor of iptables
		}
		if !logged {
			log.Info("waiting for the last connections of mode ipvs before its rules are removed", "endpoints", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// ipvsFamilies returns the address families in which the kernel has IPVS.
func ipvsFamilies(ctx context.Context) []tracker.Family {
	var out []tracker.Family
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if ipvs.Probe(ctx, ipvs.Config{Families: []tracker.Family{f}}) == nil {
			out = append(out, f)
		}
	}
	return out
}
