package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const explainUsage = `Usage: nodeproxy explain [flags] ADDR:PORT[/PROTOCOL]

Prints what the objects require for the first packet of a connection, and why. Unless
--kernel=false, it compares that with the rules in the kernel of the network namespace
it runs in. It reads the objects from where run reads them, with the same flags. The
protocol is TCP by default.

`

// explain runs the verb explain. It compares the ruleset's verdict on a packet with the rules
// in the kernel.
func (p *program) explain(ctx context.Context, args []string) error {
	var from, in string
	var kernel bool
	flags := newFlags("explain", explainUsage, p.diag)
	flags.StringVar(&from, "from", "", "the source `address` of the packet, optionally with its port (ADDR:PORT); if empty, the node's own address")
	flags.StringVar(&in, "in-interface", "", "the `interface` the packet comes in by; if empty and --from is not the node's own address, an interface that belongs to no pod")
	flags.BoolVar(&kernel, "kernel", true, "compare with the rules in the kernel")
	cfg, log, packet, err := p.parsePacketArgs(flags, args)
	if err != nil {
		return err
	}
	w, err := peek(ctx, cfg, log)
	if err != nil {
		return err
	}
	packet.NodeAddresses = w.tracker.Node().Addresses
	if packet.To.Addr().IsLoopback() { // which every node has
		packet.NodeAddresses = []netip.Addr{packet.To.Addr()}
	}
	packet.InInterface = in
	var source netip.AddrPort
	if from != "" {
		if source, err = parseSource(from, packet.To.Addr()); err != nil {
			return err
		}
		packet.From = source.Addr()
		if in == "" && !slices.Contains(packet.NodeAddresses, packet.From) {
			packet.InInterface = outside
		}
	} else {
		for _, a := range packet.NodeAddresses {
			if !packet.From.IsValid() && a.Is4() == packet.To.Addr().Is4() {
				packet.From = a
			}
		}
		source = netip.AddrPortFrom(packet.From, 0)
	}
	snapshot := w.engine.Snapshot()
	q := question{packet, snapshot.Trace(packet), false}
	q.internal = internal(snapshot.Node, packet, q.verdict.Frontend)
	writeVerdict(p.out, q.verdict)
	q.writeHash(p.out, cfg.Mode, source, snapshot.Node.HashSeed)
	if why := cfg.LoopbackServer(packet.To.Addr()); why != "" && q.verdict.Frontend != nil {
		_, err := fmt.Fprintln(p.out, "kernel: has no rule for it;", why)
		return err
	}
	if !kernel {
		return nil
	}
	m, err := findMode(p.modes, cfg.Mode)
	if err != nil {
		return err
	}
	if m.lookup == nil {
		_, err := fmt.Fprintf(p.out, "kernel: has no rules in mode %s; the agent's process serves the Service if the node has the address\n", cfg.Mode)
		return err
	}
	err = q.compareKernel(ctx, p.out, m)
	if others := writeOthers(ctx, p.out, m, log); err == nil {
		err = others
	}
	return err
}

// peekTimeout is how long watchWorld waits for an API server.
const peekTimeout = 30 * time.Second

// peek returns the world in its present state.
func peek(ctx context.Context, cfg *config.Config, log *slog.Logger) (*world, error) {
	live, err := watchWorld(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	live.close()
	return live.world, nil
}

// liveWorld is a world that follows its source until it is closed.
type liveWorld struct {
	*world
	// changed has a value if the world has changed since the last value was received.
	changed <-chan struct{}
	close   func()
}

// watchWorld returns the world after all objects are listed.
func watchWorld(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *liveWorld, err error) {
	wait, cancelWait := context.WithTimeout(ctx, peekTimeout)
	defer cancelWait()
	src, _, err := newSource(cfg, log)
	if err != nil {
		return nil, err
	}
	stop := []func(){src.close}
	closeAll := sync.OnceFunc(func() {
		for _, f := range slices.Backward(stop) {
			f()
		}
	})
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	node, err := src.node(wait, cfg.Effective.DetectLocalMode == config.NodeCIDR)
	if err != nil {
		return nil, err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	stop = append(stop, nl.Close)
	w, err := newWorld(cfg, nil, node, worldHooks{
		apiServer: findAPIAddresses(wait, cfg, log),
		own:       func() ([]netip.Addr, error) { return ownAddresses(nl) },
		failed:    func(error) {},
	}, log)
	if err != nil {
		return nil, err
	}
	changed := make(chan struct{}, 1)
	w.tracker.Notify(func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- src.follow(ctx, w) }()
	stop = append(stop, func() {
		cancel()
		<-done
	})
	for !w.tracker.Synced() {
		select {
		case <-changed:
		case <-wait.Done():
			return nil, fmt.Errorf("cannot list the objects: %w", wait.Err())
		}
	}
	return &liveWorld{world: w, changed: changed, close: closeAll}, nil
}

// parsePacketArgs parses the command line of explain or trace: flags and a destination.
func (p *program) parsePacketArgs(flags *config.Flags, args []string) (*config.Config, *slog.Logger, ruleset.Packet, error) {
	cfg, err := parse(flags, args, 1)
	if err != nil {
		return nil, nil, ruleset.Packet{}, err
	}
	log, err := p.logger(cfg)
	if err != nil {
		return nil, nil, ruleset.Packet{}, err
	}
	packet, err := parsePacket(flags.Arg(0))
	return cfg, quiet(cfg, log), packet, err
}

// parseSource parses --from, "ADDR" or "ADDR:PORT", for packets to an address.
func parseSource(from string, to netip.Addr) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(from)
	if err != nil {
		addr, err := netip.ParseAddr(from)
		if err != nil {
			return a, bad("--from: %q is neither ADDR nor ADDR:PORT", from)
		}
		a = netip.AddrPortFrom(addr, 0)
	}
	a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	if a.Addr().Is4() != to.Is4() {
		return a, bad("--from %v and %v are of different address families", a.Addr(), to)
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
		return p, bad("%q is not ADDR:PORT", to)
	}
	switch p.Protocol {
	case v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP:
		return p, nil
	}
	return p, bad("protocol %q is not TCP, UDP or SCTP", protocol)
}

func writeVerdict(out io.Writer, v ruleset.Verdict) {
	printLine(out, "%v: %s", v.Action, v.Rule)
	if v.Service != nil {
		printLine(out, "service: %v, by its %v", v.Service.Key, v.Frontend.Kind)
	}
	writeAffinity(out, "", v)
	for _, e := range v.Endpoints {
		fmt.Fprintf(out, "endpoint: %v on node %q, %s%s\n", e.Addr, e.Node, sourceKept(v.MasqueradeTo(e)), weightOf(e, v.Endpoints))
	}
}

// writeAffinity writes the line about a verdict's client affinity, if it has any.
func writeAffinity(out io.Writer, prefix string, v ruleset.Verdict) {
	if v.Affinity != 0 {
		fmt.Fprintf(out, "%saffinity: to the same endpoint for %v\n", prefix, v.Affinity)
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

// target returns the frontend's target for the packet.
func (q question) target() ruleset.Target { return q.verdict.Frontend.TargetFor(q.internal) }

// writeHash writes, for a Service that chooses endpoints by a hash, each endpoint's share of
// the hash table, and the endpoint of the source. The table and the hash depend on the mode.
func (q question) writeHash(out io.Writer, mode string, source netip.AddrPort, seed uint64) {
	v := q.verdict
	if v.Action != ruleset.ActionForward || v.Service.Hash() == tracker.HashNone {
		return
	}
	table, pool := v.Service.Maglev(q.target(), seed), v.Service.Pool(q.target())
	what := "source address"
	if v.Hash == tracker.HashSourcePort {
		what += " and port"
	}
	switch mode {
	case config.ModeIPTables:
		fmt.Fprintf(out, "hash: by %s, which mode iptables does not support: it chooses endpoints at random\n", what)
		return
	case config.ModeIPVS:
		fmt.Fprintf(out, "hash: by %s, in the kernel's own Maglev table (scheduler mh); explain cannot compute which endpoint a source gets\n", what)
		return
	}
	fmt.Fprintf(out, "hash: by %s, in a Maglev table of %d slots\n", what, table.Len())
	slots := make([]int, len(pool))
	for i := range table.Len() {
		slots[table.At(i)]++
	}
	for i, e := range pool {
		fmt.Fprintf(out, "hash: %d slots of %v\n", slots[i], e.Addr)
	}
	unless := ""
	if v.Affinity != 0 {
		unless = ", unless client affinity holds another endpoint"
	}
	switch {
	case v.Hash == tracker.HashSourcePort && source.Port() == 0:
		fmt.Fprintf(out, "hash: add a port to see the endpoint of the source: --from %v\n", netip.AddrPortFrom(source.Addr(), 40000))
	case v.Hash == tracker.HashSourcePort:
		fmt.Fprintf(out, "hash: %v goes to %v%s\n", source, pool[table.Find(v.Service.HashOf(source, seed))].Addr, unless)
	default:
		fmt.Fprintf(out, "hash: %v goes to %v%s\n", source.Addr(), pool[table.Find(v.Service.HashOf(source, seed))].Addr, unless)
	}
}
