package inspect

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// errDiffers ends explain when the kernel treats a packet differently.
var errDiffers = errors.New("the kernel's rules differ from what the objects require")

// errNoRules ends explain when the kernel has no rules of the mode.
var errNoRules = errors.New("the kernel has no rules of this mode: the agent does not run here, or has not synced yet")

// errOthers ends explain when rules of another proxy may treat the packet first.
var errOthers = errors.New("rules of another proxy may take the packet first")

// writeOthers prints the rules of other proxies in the network namespace, and returns errOthers
// if there are any.
func writeOthers(ctx context.Context, out io.Writer, m modes.Mode, log *slog.Logger) error {
	rules, err := modes.OtherRules(ctx, false, log)
	if err != nil {
		return err
	}
	kinds := slices.SortedFunc(maps.Keys(rules), func(a, b takeover.Kind) int { return strings.Compare(a.String(), b.String()) })
	for _, kind := range kinds {
		if kind == (takeover.Kind{Owner: takeover.Nodeproxy, Mode: m.Name}) {
			continue
		}
		err = errOthers
		if m.TakesOver && kind.Mode == m.Name {
			printLine(out, "kernel: kube-proxy has written the rules of mode %s last", m.Name)
			continue
		}
		printLine(out, "kernel: rules of %s are there, too, and may take this packet first", kind)
	}
	return err
}

// question is a packet that is looked up in the kernel, and its verdict.
type question struct {
	packet  ruleset.Packet
	verdict ruleset.Verdict
	// internal reports that the packet comes from the node or one of its pods, and that
	// the frontend treats such packets differently.
	internal bool
}

// query returns what to ask the kernel.
func (q question) query() dataplane.Query {
	f := q.verdict.Frontend
	return dataplane.Query{Packet: q.packet, Internal: q.internal, NodePort: f != nil && f.Kind == ruleset.KindNodePort}
}

// compare prints where the kernel sends a packet, which the mode's Lookup has returned, and whether that agrees with
// the verdict. It returns errDiffers if it does not.
func (q question) compare(out io.Writer, m modes.Mode, found dataplane.Found, err error) error {
	var drift *dataplane.DriftError
	differs := false
	switch {
	case errors.Is(err, dataplane.ErrNoRules):
		printLine(out, "kernel: mode %s has no rules in this network namespace", m.Name)
		return errNoRules
	case errors.As(err, &drift):
		printLine(out, "kernel: %s", drift.What)
		differs = true
	case err != nil:
		return err
	default:
		where := found.Where
		if found.Service != "" {
			where += ", for " + found.Service
		}
		printLine(out, "kernel: %s", where)
		for _, ep := range found.Endpoints {
			printLine(out, "kernel: endpoint %v", ep)
		}
		want, s := q.entry(), q.verdict.Port
		if m.Name == config.ModeIPTables {
			want = q.verdict.Endpoints // its rules match the packet's source
		}
		differs = !slices.Equal(found.Endpoints, addresses(want)) ||
			found.Service != "" && (s == nil || !storedAs(found.Service, s.Key.ServicePortName))
	}
	if differs {
		printLine(out, "kernel: DIFFERS from what the objects require")
		return errDiffers
	}
	printLine(out, "kernel: agrees")
	return nil
}

// addresses returns the addresses of endpoints, sorted, each once.
func addresses(endpoints []*tracker.Endpoint) (out []netip.AddrPort) {
	for _, ep := range endpoints {
		out = append(out, ep.Addr)
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// entry returns the endpoints that the packet's entry must lead to, even if packets from
// its source are dropped.
func (q question) entry() []*tracker.Endpoint {
	f := q.verdict.Frontend
	if f == nil || f.Admits(q.packet.From) {
		return q.verdict.Endpoints
	}
	return q.verdict.Port.Pool(f.TargetFor(q.internal))
}

// internal reports whether a packet comes from the node or its pods and the frontend treats
// such packets differently from others.
func internal(n *ruleset.Node, p ruleset.Packet, f *ruleset.Frontend) bool {
	return f != nil && f.ShortCircuit() && (p.InInterface == "" || n.LocalTraffic.Recognizes(p.From, p.InInterface))
}
