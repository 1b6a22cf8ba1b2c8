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

Tells what must happen to the first packet of a connection, and by which rule; and
compares that with the rules in the kernel of the network namespace it runs in,
unless --kernel=false. What the world is comes from where run has it from, with the
same flags. The protocol is TCP unless given.

`

// explain is the verb explain: it asks the ruleset what must happen to a packet,
// and the kernel what would.
func (p *program) explain(ctx context.Context, args []string) error {
	var from, in string
	var kernel bool
	flags := newFlags("explain", explainUsage, p.diag)
	flags.StringVar(&from, "from", "", "the `address` the packet comes from, which its port may follow (ADDR:PORT); the node's own if empty")
	flags.StringVar(&in, "in-interface", "", "the `interface` the packet comes in by; one that is no pod's if empty and --from is not the node's own address")
	flags.BoolVar(&kernel, "kernel", true, "compare with what is in the kernel")
	cfg, err := parse(flags, args, 1)
	if err != nil {
		return err
	}
	log, err := p.logger(cfg)
	if err != nil {
		return err
	}
	log = quiet(cfg, log)
	packet, err := parsePacket(flags.Arg(0))
	if err != nil {
		return err
	}
	w, err := peek(ctx, cfg, log)
	if err != nil {
		return err
	}
	packet.NodeAddresses = w.tracker.Node().Addresses
	packet.InInterface = in
	var source netip.AddrPort
	if from != "" {
		if source, err = parseSource(from); err != nil {
			return err
		}
		packet.From = source.Addr()
		if packet.From.Is4() != packet.To.Addr().Is4() {
			return bad("--from %v and %v are of different address families", packet.From, packet.To)
		}
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
	if !kernel {
		return nil
	}
	return p.compare(ctx, cfg, q)
}

// peekTimeout is how long to wait for an API server.
const peekTimeout = 30 * time.Second

// peek returns the world as it is at this moment.
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
	// changed has a value when the world has changed since the last one was taken.
	changed <-chan struct{}
	close   func()
}

// watchWorld returns the world when it is complete.
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
		return nil, fmt.Errorf("netlink: %w", err)
	}
	stop = append(stop, nl.Close)
	w, err := newWorld(cfg, nil, node, worldHooks{
		own:    func() ([]netip.Addr, error) { return ownAddresses(nl) },
		failed: func(error) {},
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
			return nil, fmt.Errorf("the objects could not be listed: %w", wait.Err())
		}
	}
	return &liveWorld{world: w, changed: changed, close: closeAll}, nil
}

// parseSource reads "ADDR" or "ADDR:PORT".
func parseSource(s string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a.Unmap(), 0), nil
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return a, bad("--from: %q is neither ADDR nor ADDR:PORT", s)
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
}

// outside stands for the interface of a packet of which only the source is known.
const outside = "(outside)"

// parsePacket reads "ADDR:PORT[/PROTOCOL]".
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
	fmt.Fprintf(out, "%v: %s\n", v.Action, v.Rule)
	if v.Service != nil {
		fmt.Fprintf(out, "service: %v, by its %v\n", v.Service.Key, v.Frontend.Kind)
	}
	if v.Affinity != 0 {
		fmt.Fprintf(out, "affinity: to the same endpoint for %v\n", v.Affinity)
	}
	for _, e := range v.Endpoints {
		source := "source kept"
		if v.MasqueradeTo(e) {
			source = "masqueraded"
		}
		fmt.Fprintf(out, "endpoint: %v on node %q, %s%s\n", e.Addr, e.Node, source, weightOf(e, v.Endpoints))
	}
}

// weightOf says what share of new connections an endpoint gets, if not all get the
// same.
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

// target is what the packet's frontend has it meet.
func (q question) target() ruleset.Target { return q.verdict.Frontend.TargetFor(q.internal) }

// writeHash says, of a Service whose endpoints follow from a hash, what share of the
// table each has, and which one is the source's. What is written depends on the mode,
// as the table and the hash do.
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
		fmt.Fprintf(out, "hash: asked for by %s, but mode iptables draws endpoints at random\n", what)
		return
	case config.ModeIPVS:
		fmt.Fprintf(out, "hash: by %s, in the kernel's own Maglev table (scheduler mh); which endpoint a source gets cannot be told from here\n", what)
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
		unless = ", unless it is remembered with another"
	}
	switch {
	case v.Hash == tracker.HashSourcePort && source.Port() == 0:
		fmt.Fprintf(out, "hash: --from %v tells which one the source gets\n", netip.AddrPortFrom(source.Addr(), 40000))
	case v.Hash == tracker.HashSourcePort:
		fmt.Fprintf(out, "hash: %v goes to %v%s\n", source, pool[table.Find(v.Service.HashOf(source, seed))].Addr, unless)
	default:
		fmt.Fprintf(out, "hash: %v goes to %v%s\n", source.Addr(), pool[table.Find(v.Service.HashOf(source, seed))].Addr, unless)
	}
}

// compare prints what the kernel would do with a packet, and whether that is right.
func (p *program) compare(ctx context.Context, cfg *config.Config, q question) error {
	m, err := findMode(p.modes, cfg.Mode)
	if err != nil {
		return err
	}
	return q.compareKernel(ctx, p.out, m)
}
