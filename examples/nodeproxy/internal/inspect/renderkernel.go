package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// theKernel is the value of --diff that means the rules in the kernel.
const theKernel = "kernel"

// diffKernel writes each address and port of a Service for which the rules in the kernel have other endpoints
// than the objects, and each Service that the kernel alone has.
func diffKernel(ctx context.Context, out io.Writer, cfg *config.Config, log *slog.Logger) error {
	m, err := modes.Find(modes.All(cfg), cfg.Mode)
	if err != nil {
		return err
	}
	if m.Lookup == nil {
		return fmt.Errorf("mode %s has no rules in the kernel", cfg.Mode)
	}
	w, err := objects.Peek(ctx, cfg, log)
	if err != nil {
		return err
	}
	local, err := localAddresses()
	if err != nil {
		return err
	}
	snapshot := w.Engine.Snapshot()
	// First the addresses of the Node that the node has: the Node may have others.
	own := slices.Concat(w.Tracker.Node().Addresses, local)
	slices.SortStableFunc(own, func(a, b netip.Addr) int {
		return cmp.Compare(min(0, slices.Index(local, b)), min(0, slices.Index(local, a)))
	})
	known := map[rowName]bool{}
	var asked []question
	var keys []tracker.Key
	var queries []dataplane.Query
	for _, s := range slices.SortedFunc(slices.Values(snapshot.Ports), func(a, b *ruleset.Port) int { return cmp.Compare(a.Key.String(), b.Key.String()) }) {
		known[stored(nameOf(s.Key))] = true
		for i := range s.Frontends {
			f := &s.Frontends[i]
			p := ruleset.Packet{From: clientFor(s.Key.Family, f), InInterface: outside, To: netip.AddrPortFrom(f.Addr, f.Port), Protocol: s.Key.Protocol, NodeAddresses: own}
			if f.Kind == ruleset.KindNodePort {
				at := slices.IndexFunc(own, func(a netip.Addr) bool {
					return tracker.FamilyOf(a) == s.Key.Family && !a.IsLoopback() && !a.IsLinkLocalUnicast()
				})
				if at < 0 {
					continue // the node has no address in the family
				}
				p.To = netip.AddrPortFrom(own[at], f.Port)
			}
			q := question{packet: p, verdict: snapshot.Trace(p)}
			asked, keys, queries = append(asked, q), append(keys, s.Key), append(queries, q.query())
		}
	}
	differs := false
	found, errs := m.Lookup(ctx, queries)
	for i, q := range asked {
		var text strings.Builder
		err := q.compare(&text, m, found[i], errs[i])
		if errors.Is(err, errDiffers) {
			differs = true
			printLine(out, "~%v %v: %v, endpoints %v", keys[i], q.packet.To, q.verdict.Action, addresses(q.verdict.Endpoints))
			_, err = io.WriteString(out, text.String())
		}
		if err != nil {
			return err
		}
	}
	extra, err := kernelAlone(ctx, m.Name, known)
	if err != nil {
		return err
	}
	for _, name := range extra {
		if err := printLine(out, "-%s: the kernel alone has it", name); err != nil {
			return err
		}
	}
	if differs || len(extra) != 0 {
		return cli.StatusError(1)
	}
	return nil
}

// clientFor returns an address that a frontend admits.
func clientFor(f tracker.Family, at *ruleset.Frontend) netip.Addr {
	if len(at.Sources) != 0 {
		return at.Sources[0].Addr()
	}
	if f == tracker.IPv6 {
		return netip.MustParseAddr("2001:db8:ffff:ffff::1") // RFC 3849
	}
	return netip.MustParseAddr("198.51.100.1") // RFC 5737
}

// stored returns a name as far as mode nftables stores it.
func stored(n rowName) rowName {
	n.Service, n.Port, _ = strings.Cut(nft.Printable(n.Service+":"+n.Port), ":")
	return n
}

// kernelAlone returns the Services that the kernel has and the objects do not, as far as the mode can list them. known
// has the names of the objects' Services, as stored returns them.
func kernelAlone(ctx context.Context, mode string, known map[rowName]bool) ([]string, error) {
	in, err := readTraffic(ctx, mode)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for k := range in.ready {
		if n := nameOf(k); !known[stored(n)] {
			names[n.String()] = true
		}
	}
	for n := range in.counters {
		if !known[stored(n)] && strings.Contains(n.Service, "/") {
			names[n.String()] = true
		}
	}
	return slices.Sorted(maps.Keys(names)), nil
}
