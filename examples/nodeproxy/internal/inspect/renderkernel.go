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
	// A Node may have an address that the node lacks.
	own := slices.Concat(w.Tracker.Node().Addresses, local)
	slices.SortStableFunc(own, func(a, b netip.Addr) int {
		return cmp.Compare(min(0, slices.Index(local, b)), min(0, slices.Index(local, a)))
	})
	d := &kernelDiff{out: out, mode: m, snapshot: snapshot, own: own}
	known := map[rowName]bool{}
	for _, s := range slices.SortedFunc(slices.Values(snapshot.Ports), func(a, b *ruleset.Port) int { return cmp.Compare(a.Key.String(), b.Key.String()) }) {
		known[stored(nameOf(s.Key))] = true
		for i := range s.Frontends {
			d.ask(s, &s.Frontends[i])
		}
	}
	if err := d.compare(ctx); err != nil {
		return err
	}
	if err := d.extra(ctx, known); err != nil || !d.differs {
		return err
	}
	return cli.StatusError(1)
}

// kernelDiff compares a ruleset with the kernel's rules.
type kernelDiff struct {
	out      io.Writer
	mode     modes.Mode
	snapshot *ruleset.Snapshot
	own      []netip.Addr // the node's addresses
	asked    []asked
	differs  bool // a difference was written
}

// asked is a question about an address and port of a Service port.
type asked struct {
	key tracker.Key
	question
}

// ask adds the question about a frontend of a Service port, for a client elsewhere.
func (d *kernelDiff) ask(s *ruleset.Port, f *ruleset.Frontend) {
	to := f.Addr
	if f.Kind == ruleset.KindNodePort {
		i := slices.IndexFunc(d.own, func(a netip.Addr) bool {
			return tracker.FamilyOf(a) == s.Key.Family && !a.IsLoopback() && !a.IsLinkLocalUnicast()
		})
		if i < 0 {
			return // the node has no address in the family
		}
		to = d.own[i]
	}
	p := ruleset.Packet{
		From: clientFor(s.Key.Family, f), InInterface: outside, To: netip.AddrPortFrom(to, f.Port), Protocol: s.Key.Protocol, NodeAddresses: d.own,
	}
	d.asked = append(d.asked, asked{s.Key, question{packet: p, verdict: d.snapshot.Trace(p)}})
}

// compare asks the kernel and writes what differs.
func (d *kernelDiff) compare(ctx context.Context) error {
	var queries []dataplane.Query
	for _, q := range d.asked {
		queries = append(queries, q.query())
	}
	found, errs := d.mode.Lookup(ctx, queries)
	for i, q := range d.asked {
		var text strings.Builder
		err := q.compareFound(&text, d.mode, found[i], errs[i])
		if errors.Is(err, errDiffers) {
			d.differs = true
			printLine(d.out, "~%v %v: %v, endpoints %v", q.key, q.packet.To, q.verdict.Action, q.addresses(q.verdict.Endpoints))
			_, err = io.WriteString(d.out, text.String())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// addresses returns where a packet goes that goes to one of the endpoints.
func (q question) addresses(endpoints []*tracker.Endpoint) []netip.AddrPort {
	var out []netip.AddrPort
	for _, ep := range endpoints {
		out = append(out, ep.Addr)
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
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

// extra writes the Services that the kernel has and the objects do not, as far as the mode can list them. known has the
// names of the objects' Services, as stored returns them.
func (d *kernelDiff) extra(ctx context.Context, known map[rowName]bool) error {
	in, err := readTraffic(ctx, d.mode.Name)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for k := range in.ready {
		if !known[stored(nameOf(k))] {
			names[nameOf(k).String()] = true
		}
	}
	for n := range in.counters {
		if !known[stored(n)] && strings.Contains(n.Service, "/") {
			names[n.String()] = true
		}
	}
	d.differs = d.differs || len(names) != 0
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if err := printLine(d.out, "-%s: the kernel alone has it", name); err != nil {
			return err
		}
	}
	return nil
}
