// Package inspect has the verbs explain, trace and top, which read the kernel of a node.
package inspect

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The texts of trace for every system.
const (
	traceUse   = "trace [flags] ADDR:PORT[/PROTOCOL]"
	traceShort = "follow real connections"
)

const explainLong = `Prints what the objects require for the first packet of a connection, and why. Unless
--kernel=false, it compares that with the rules in the kernel of the network namespace
it runs in. It reads the objects from where run reads them, with the same flags. The
protocol is TCP by default.

It names what the agent leaves out of the Service that has the address, or would have it,
and of its EndpointSlices, with the reason that Events and the metric
proxier_left_out_total have.

With --all it prints each Service port that cannot work on this node, with the reason,
each that lacks parts because of --budget, each address and port that belongs to another
Service, and what else is left out of objects by mistake.

The exit status is 1 if the kernel differs from the objects or has no rules, or if --all
found something.
`

type explainOptions struct {
	from, in    string
	kernel, all bool
}

// ExplainCommand returns the verb explain.
func ExplainCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{
		Use:   "explain [flags] {ADDR:PORT[/PROTOCOL] | --all}",
		Short: "print what happens to a packet, or every Service that cannot work",
		Long:  explainLong,
	}
	var o explainOptions
	flags := p.AddFlags(c)
	flags.StringVar(&o.from, "from", "", "the source `address` of the packet, optionally with its port (ADDR:PORT); if empty, the node's own address")
	flags.StringVar(&o.in, "in-interface", "", "the `interface` the packet comes in by; if empty and --from is not the node's own address, an interface that belongs to no pod")
	flags.BoolVar(&o.kernel, "kernel", true, "compare with the rules in the kernel")
	flags.BoolVar(&o.all, "all", false, "print every Service port that cannot work, with the reason")
	c.RunE = func(c *cobra.Command, _ []string) error { return explain(c.Context(), p, flags, o) }
	return c
}

// explain runs the verb explain. It compares the ruleset's verdict on a packet with the rules in
// the kernel.
func explain(ctx context.Context, p *cli.Program, flags *config.Flags, o explainOptions) error {
	destinations := 1
	if o.all {
		destinations = 0
	}
	cfg, log, packet, err := packetArgs(p, flags, destinations)
	if err != nil {
		return err
	}
	w, err := objects.Peek(ctx, cfg, log)
	if err != nil {
		return err
	}
	if o.all {
		return explainAll(p.Out, w)
	}
	q, err := o.ask(p.Out, w, packet)
	if err != nil {
		return err
	}
	if why := cfg.LoopbackServer(packet.To.Addr()); why != "" && q.verdict.Frontend != nil {
		return printLine(p.Out, "kernel: has no rule for it; %s", why)
	}
	if !o.kernel {
		return nil
	}
	m, err := modes.Find(modes.All(cfg), cfg.Mode)
	if err != nil {
		return err
	}
	if m.Lookup == nil {
		return printLine(p.Out, "kernel: has no rules in mode %s; the agent's process serves the Service if the node has the address", cfg.Mode)
	}
	found, err := m.LookupOne(ctx, q.query())
	err = q.compare(p.Out, m, found, err)
	if others := writeOthers(ctx, p.Out, m, log); err == nil {
		err = others
	}
	return err
}

// ask writes the ruleset's verdict on a packet to the destination of packet. It returns the question to
// ask the kernel.
func (o explainOptions) ask(out io.Writer, w *objects.World, packet ruleset.Packet) (q question, err error) {
	own := w.Tracker.Node().Addresses
	if packet.To.Addr().IsLoopback() { // which every node has
		own = []netip.Addr{packet.To.Addr()}
	}
	packet.NodeAddresses, packet.InInterface = own, o.in
	if o.kernel {
		// The kernel serves NodePorts at addresses that the Node object lacks, too.
		local, err := localAddresses()
		if err != nil {
			return q, err
		}
		packet.NodeAddresses = slices.Concat(own, local)
	}
	var source netip.AddrPort
	if o.from != "" {
		if source, err = parseSource(o.from, packet.To.Addr()); err != nil {
			return q, err
		}
		if o.in == "" && !slices.Contains(packet.NodeAddresses, source.Addr()) {
			packet.InInterface = outside
		}
	} else if i := slices.IndexFunc(own, func(a netip.Addr) bool { return a.Is4() == packet.To.Addr().Is4() }); i >= 0 {
		source = netip.AddrPortFrom(own[i], 0)
	}
	packet.From = source.Addr()
	snapshot := w.Engine.Snapshot()
	q = question{packet, snapshot.Trace(packet), false}
	q.internal = internal(snapshot.Node, packet, q.verdict.Frontend)
	writeVerdict(out, q.verdict)
	why := writeWhyEmpty(out, "", w, q.verdict)
	writeFindings(out, w, snapshot, packet, q.verdict, why)
	q.writeHash(out, w.Config.Mode, source, snapshot.Node.HashSeed)
	return q, nil
}

// packetArgs returns what the command line of a verb has: flags and n destinations, 1 or 0.
func packetArgs(p *cli.Program, flags *config.Flags, n int) (cfg *config.Config, log *slog.Logger, packet ruleset.Packet, err error) {
	if cfg, err = cli.Configure(flags, n); err != nil {
		return nil, nil, packet, err
	}
	if log, err = p.Logger(cfg.Effective, cfg.Gates, cfg.LogFile); err != nil {
		return nil, nil, packet, err
	}
	if n != 0 {
		packet, err = parsePacket(flags.Arg(0))
	}
	return cfg, cli.Quiet(cfg, log), packet, err
}

// writeWhyEmpty writes why the Service of a verdict has no endpoints, if it has none. It returns the
// findings that are the reason.
func writeWhyEmpty(out io.Writer, prefix string, w *objects.World, v ruleset.Verdict) []finding {
	if v.Action != ruleset.ActionReject || v.Port == nil || v.Port.Selection.HasAny {
		return nil
	}
	s := w.KeptService(v.Port.Key.NamespacedName)
	if s == nil {
		return nil
	}
	text, causes := whyEmpty(w, s, v.Port)
	printLine(out, "%sbecause: %s", prefix, text)
	return causes
}

// parseSource parses --from, "ADDR" or "ADDR:PORT", for packets to an address.
func parseSource(from string, to netip.Addr) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(from)
	if err != nil {
		addr, err := netip.ParseAddr(from)
		if err != nil {
			return a, cli.Bad("--from: %q is neither ADDR nor ADDR:PORT", from)
		}
		a = netip.AddrPortFrom(addr, 0)
	}
	a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	if a.Addr().Is4() != to.Is4() {
		return a, cli.Bad("--from %v and %v are of different address families", a.Addr(), to)
	}
	return a, nil
}

// outside stands for the incoming interface of a packet if only its source is known.
const outside = "(outside)"

// parsePacket parses "ADDR:PORT[/PROTOCOL]".
func parsePacket(s string) (ruleset.Packet, error) {
	to, protocol, given := strings.Cut(s, "/")
	p := ruleset.Packet{Protocol: v1.ProtocolTCP}
	if given {
		p.Protocol = v1.Protocol(strings.ToUpper(protocol))
	}
	var err error
	if p.To, err = netip.ParseAddrPort(to); err != nil {
		return p, cli.Bad("%q is not ADDR:PORT", to)
	}
	switch p.Protocol {
	case v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP:
		return p, nil
	}
	return p, cli.Bad("protocol %q is not TCP, UDP or SCTP", protocol)
}

func writeVerdict(out io.Writer, v ruleset.Verdict) {
	printLine(out, "%v: %s", v.Action, v.Rule)
	if v.Port != nil {
		printLine(out, "service: %v, by its %v", v.Port.Key, v.Frontend.Kind)
	}
	writeAffinity(out, "", v)
	for _, e := range v.Endpoints {
		printLine(out, "endpoint: %v on node %q, %s%s", e.Addr, e.Node, sourceKept(v.MasqueradeTo(e)), weightOf(e, v.Endpoints))
	}
}

// writeAffinity writes the line about a verdict's client affinity, if it has any.
func writeAffinity(out io.Writer, prefix string, v ruleset.Verdict) {
	if v.Affinity != 0 {
		printLine(out, "%saffinity: to the same endpoint for %v", prefix, v.Affinity)
	}
}

func sourceKept(masqueraded bool) string {
	if masqueraded {
		return "masqueraded"
	}
	return "source kept"
}

// weightOf returns the weight of an endpoint and its share of new connections as text, or
// "" if all endpoints have the same weight.
func weightOf(e *tracker.Endpoint, all []*tracker.Endpoint) string {
	sum, same := 0, true
	for _, o := range all {
		sum += int(o.Weight)
		same = same && o.Weight == e.Weight
	}
	if same {
		return ""
	}
	return fmt.Sprintf(", weight %d (%.3g %%)", e.Weight, 100*float64(e.Weight)/float64(sum))
}

// writeHash writes, for a Service that chooses endpoints by a hash, each endpoint's share of
// the hash table, and the endpoint of the source. The table and the hash depend on the mode.
func (q question) writeHash(out io.Writer, mode string, source netip.AddrPort, seed uint64) {
	v := q.verdict
	if v.Action != ruleset.ActionForward || v.Port.Hash() == tracker.HashNone {
		return
	}
	target := v.Frontend.TargetFor(q.internal)
	table, pool := v.Port.Maglev(target, seed), v.Port.Pool(target)
	what, from, byPort := "source address", source.Addr().String(), v.Hash == tracker.HashSourcePort
	if byPort {
		what, from = "source address and port", source.String()
	}
	hash := func(format string, args ...any) { printLine(out, "hash: "+format, args...) }
	switch mode {
	case config.ModeIPTables:
		hash("by %s, which mode iptables does not support: it chooses endpoints at random", what)
		return
	case config.ModeIPVS:
		hash("by %s, in the kernel's own Maglev table (scheduler mh); explain cannot compute which endpoint a source gets", what)
		return
	}
	hash("by %s, in a Maglev table of %d slots", what, table.Len())
	slots := make([]int, len(pool))
	for i := range table.Len() {
		slots[table.At(i)]++
	}
	for i, e := range pool {
		hash("%d slots of %v", slots[i], e.Addr)
	}
	if byPort && source.Port() == 0 {
		hash("add a port to see the endpoint of the source: --from %v", netip.AddrPortFrom(source.Addr(), 40000))
		return
	}
	unless := ""
	if v.Affinity != 0 {
		unless = ", unless client affinity holds another endpoint"
	}
	hash("%s goes to %v%s", from, pool[table.Find(v.Port.HashOf(source, seed))].Addr, unless)
}
