package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/follow"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const traceUsage = `Usage: nodeproxy trace [flags] ADDR:PORT[/PROTOCOL]

Follows real connections to a destination through the kernel of the network namespace
it runs in, for a time. For each it prints which chains its first packet met, which
endpoint it got or who dropped it, and whether that is what must happen by the
objects, which come from where run has them from, with the same flags. The last line
tells whether all agree. The exit status is 1 if not, or if no connection was seen.
The protocol is TCP unless given.

It needs CAP_NET_ADMIN. With --by nftrace, the default, it installs a table called
proxier-trace-PID, which follows up to 100 new connections a second and which the
kernel removes when the program ends, however it ends. It shows chains of nf_tables,
also those of iptables-nft; of iptables-legacy and IPVS it shows what came of them.
With --by conntrack it installs nothing and shows connections that got through, but
none that was refused or dropped. That is also what it does where the kernel has no
nf_tables.

`

// The ways to follow connections.
const (
	byNFTrace   = "nftrace"
	byConntrack = "conntrack"
)

// errTrace ends trace when connections did not go where they must, or there were none.
var errTrace = errors.New("the connections are not what they should be")

// trace is the verb trace.
func (p *program) trace(ctx context.Context, args []string) error {
	var from, by string
	var must bool
	var long time.Duration
	var count int
	flags := newFlags("trace", traceUsage, p.diag)
	flags.StringVar(&from, "from", "", "follow connections from this `address` only, which a port may follow (ADDR:PORT)")
	flags.DurationVar(&long, "for", 10*time.Second, "how long to follow")
	flags.IntVar(&count, "count", 0, "end after so many connections; 0 is no limit")
	flags.BoolVar(&must, "must", true, "compare with what must happen; false needs no objects")
	flags.StringVar(&by, "by", byNFTrace, "what the kernel is asked: nftrace or conntrack")
	cfg, err := parse(flags, args, 1)
	if err != nil {
		return err
	}
	log, err := p.logger(cfg)
	if err != nil {
		return err
	}
	log = quiet(cfg, log)
	what, err := parsePacket(flags.Arg(0))
	if err != nil {
		return err
	}
	t := &tracing{out: p.out, mode: cfg.Mode, packet: what}
	filter := follow.Filter{To: netip.AddrPortFrom(what.To.Addr().Unmap(), what.To.Port()), Protocol: protocolNumber(what.Protocol)}
	if from != "" {
		if filter.From, err = parseSource(from); err != nil {
			return err
		}
		if filter.From.Addr().Is4() != filter.To.Addr().Is4() {
			return bad("--from %v and %v are of different address families", filter.From.Addr(), filter.To.Addr())
		}
	}
	if long <= 0 || count < 0 {
		return bad("--for %v --count %d: must be positive", long, count)
	}
	if by != byNFTrace && by != byConntrack {
		return bad("--by %q is neither nftrace nor conntrack", by)
	}
	if must {
		live, err := watchWorld(ctx, cfg, log)
		if err != nil {
			return err
		}
		defer live.close()
		t.expected = newHistory(live)
	}
	if t.addresses, err = localAddresses(); err != nil {
		return err
	}
	f, err := follower(by, filter, p.diag)
	if err != nil {
		return err
	}
	defer f.Close()
	fmt.Fprintf(p.out, "following connections to %v/%s for %v\n", filter.To, what.Protocol, long)
	ctx, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	err = f.Follow(ctx, func(packet *follow.Packet) bool {
		t.connection(packet)
		return count == 0 || t.seen < count
	})
	if n := f.Overrun(); n != 0 {
		fmt.Fprintf(p.out, "note: the kernel's messages came too fast; some connections may be missing or incomplete\n")
	}
	if err != nil {
		return err
	}
	return t.summary()
}

// follower begins to follow.
func follower(by string, filter follow.Filter, diag io.Writer) (follow.Follower, error) {
	var f follow.Follower
	var err error
	if by == byNFTrace {
		if f, err = follow.NFTrace(filter); errors.Is(err, errors.ErrUnsupported) {
			fmt.Fprintf(diag, "nodeproxy trace: %v; continuing with --by conntrack, which does not show what is refused or dropped\n", err)
			by = byConntrack
		}
	}
	if by == byConntrack {
		f, err = follow.Conntrack(filter)
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("%w; trace needs CAP_NET_ADMIN in this network namespace: run it as root", err)
	}
	return f, err
}

// protocolNumber returns a protocol's number.
func protocolNumber(p v1.Protocol) uint8 {
	switch p {
	case v1.ProtocolUDP:
		return unix.IPPROTO_UDP
	case v1.ProtocolSCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

// localAddresses returns the addresses that the kernel calls local.
func localAddresses() ([]netip.Addr, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	defer nl.Close()
	list, err := whole(func() ([]netlink.Addr, error) { return nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range list {
		out = append(out, addr(a.IP))
	}
	return out, nil
}

// tracing is one run of trace.
type tracing struct {
	out       io.Writer
	mode      string
	packet    ruleset.Packet // the destination
	addresses []netip.Addr
	expected  *history // nil if nothing is compared

	known                   map[netip.AddrPort]bool // the sources seen
	endpoints               map[netip.AddrPort]int  // how many connections each got
	seen, agreed            int
	forwarded, refused, not int
}

// connection prints what became of a connection's first packet. Later packets of the
// same connection are ignored.
func (t *tracing) connection(p *follow.Packet) {
	if t.known[p.From] {
		return
	}
	if t.known == nil {
		t.known, t.endpoints = map[netip.AddrPort]bool{}, map[netip.AddrPort]int{}
	}
	t.known[p.From] = true
	t.seen++
	packet := t.packet
	packet.From, packet.NodeAddresses, packet.InInterface = p.From.Addr(), t.addresses, t.inInterface(p)
	came := ""
	switch {
	case p.In > 0:
		came = ", in by " + packet.InInterface
	case p.In == 0:
		came = ", from this node"
	}
	fmt.Fprintf(t.out, "\nconnection: %v to %v/%s%s\n", p.From, p.To, packet.Protocol, came)
	o := t.outcome(p)
	for _, line := range o.lines {
		fmt.Fprintf(t.out, "kernel: %s\n", line)
	}
	switch {
	case o.action == ruleset.ActionForward:
		t.forwarded++
		t.endpoints[o.endpoint]++
	case o.action == ruleset.ActionReject:
		t.refused++
	default:
		t.not++
	}
	if t.expected == nil {
		return
	}
	v, err := t.expected.judge(func(s *ruleset.Snapshot) (ruleset.Verdict, error) {
		v := s.Trace(packet)
		return v, o.agrees(v)
	})
	fmt.Fprintf(t.out, "must: %v: %s\n", v.Action, v.Rule)
	if v.Affinity != 0 {
		fmt.Fprintf(t.out, "must: affinity: to the same endpoint for %v\n", v.Affinity)
	}
	if err != nil {
		for _, e := range v.Endpoints {
			fmt.Fprintf(t.out, "must: %s\n", describeEndpoint(v, e))
		}
		fmt.Fprintf(t.out, "DIFFERS: %v\n", err)
		return
	}
	t.agreed++
	fmt.Fprintln(t.out, "agrees")
}

// inInterface returns the name of the interface that a packet came in by, as
// [ruleset.Packet] has it.
func (t *tracing) inInterface(p *follow.Packet) string {
	switch {
	case p.In == 0, p.In == follow.Unknown && slices.Contains(t.addresses, p.From.Addr()):
		return ""
	case p.In == follow.Unknown:
		return outside
	}
	name, err := interfaceName(p.In)
	if err != nil {
		return outside // it is gone
	}
	return name
}

// summary prints which endpoints got how much, and the last line.
func (t *tracing) summary() error {
	if len(t.endpoints) > 0 {
		fmt.Fprintln(t.out)
	}
	for _, e := range slices.SortedFunc(maps.Keys(t.endpoints), netip.AddrPort.Compare) {
		fmt.Fprintf(t.out, "endpoint %v got %d of %d\n", e, t.endpoints[e], t.seen)
	}
	switch {
	case t.seen == 0:
		fmt.Fprintf(t.out, "\nno new connection to %v was seen\n", t.packet.To)
		return errTrace
	case t.expected == nil:
		fmt.Fprintf(t.out, "\n%s: %s\n", plural(t.seen, "connection"), t.tally())
	case t.agreed == t.seen:
		fmt.Fprintf(t.out, "\n%s: %s; kernel and objects AGREE\n", plural(t.seen, "connection"), t.tally())
	default:
		fmt.Fprintf(t.out, "\n%s: %s; kernel and objects DIFFER for %d\n", plural(t.seen, "connection"), t.tally(), t.seen-t.agreed)
		return errTrace
	}
	return nil
}

func (t *tracing) tally() string {
	return fmt.Sprintf("%d forwarded, %d refused, %d neither", t.forwarded, t.refused, t.not)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// history is what the ruleset was in the last seconds: the agent may have a change in
// effect a little before or after it is known here.
type history struct {
	live   *liveWorld
	list   []moment  // the newest last
	waited time.Time // when judge last waited for a change
}

type moment struct {
	*ruleset.Snapshot
	until time.Time // when the next one began, zero for the newest
}

// How long connections may be treated by the former state of the objects, and how long
// to wait for a change that the agent may know already. The agent's --min-sync-period is
// a second by default.
const (
	behind = 3 * time.Second
	ahead  = time.Second
)

func newHistory(live *liveWorld) *history {
	return &history{live: live, list: []moment{{Snapshot: live.engine.Snapshot()}}}
}

// judge calls fn with the present ruleset and, as long as it returns an error, with those
// that were in effect recently or come into effect soon. It returns what fn returned for
// the one that it accepted, or for the present one.
func (h *history) judge(fn func(*ruleset.Snapshot) (ruleset.Verdict, error)) (ruleset.Verdict, error) {
	select {
	case <-h.live.changed:
		h.add()
	default:
	}
	h.list = slices.DeleteFunc(h.list, func(m moment) bool { return !m.until.IsZero() && time.Since(m.until) > behind })
	var present ruleset.Verdict
	var err error
	for i, m := range slices.Backward(h.list) {
		v, e := fn(m.Snapshot)
		if e == nil {
			return v, nil
		}
		if i == len(h.list)-1 {
			present, err = v, e
		}
	}
	if time.Since(h.waited) < behind {
		return present, err
	}
	h.waited = time.Now()
	for timeout := time.After(ahead); ; {
		select {
		case <-h.live.changed:
			h.add()
			if present, err = fn(h.list[len(h.list)-1].Snapshot); err == nil {
				h.waited = time.Time{}
				return present, nil
			}
		case <-timeout:
			return present, err
		}
	}
}

// add notes a change.
func (h *history) add() {
	h.list[len(h.list)-1].until = time.Now()
	h.list = append(h.list, moment{Snapshot: h.live.engine.Snapshot()})
}

// ownsChain reports whether a chain of nf_tables is one that the agent writes in a mode.
func ownsChain(mode string, s follow.Step) bool {
	if mode == config.ModeNFTables {
		return isOwnTable(s.Table)
	}
	return isKubeChain(s.Chain)
}

// describeEndpoint says which endpoint a packet is sent to.
func describeEndpoint(v ruleset.Verdict, e *tracker.Endpoint) string {
	return fmt.Sprintf("endpoint %v, %s", e.Addr, sourceKept(v.MasqueradeTo(e)))
}

func sourceKept(masqueraded bool) string {
	if masqueraded {
		return "masqueraded"
	}
	return "source kept"
}
