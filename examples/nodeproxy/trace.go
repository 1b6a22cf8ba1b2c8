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
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/follow"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
)

const traceUsage = `Usage: nodeproxy trace [flags] ADDR:PORT[/PROTOCOL]

Follows real connections to a destination through the kernel, in the network namespace
it runs in. For each connection it prints the chains that the first packet met, the
endpoint that the connection got or the rule that stopped it, and whether that agrees
with the objects. It reads the objects from where run reads them, with the same flags.
The last line reports whether all connections agree. The exit status is 1 if they do
not, or if no connection was seen. The protocol is TCP by default.

It needs CAP_NET_ADMIN. With --by nftrace, the default, it installs a table called
proxier-trace-PID, which follows up to 100 new connections a second. The kernel removes
the table when the program ends, even if it is killed. The output shows the chains of
nf_tables, including the chains of iptables-nft. It does not show the chains of
iptables-legacy and the virtual servers of IPVS, only their effect.

With --by conntrack it installs nothing. It shows connections that got through, but not
connections that were refused or dropped. If the kernel has no nf_tables, trace uses
--by conntrack.

`

// The values of --by.
const (
	byNFTrace   = "nftrace"
	byConntrack = "conntrack"
)

// The errors that end trace after it printed its last line.
var (
	errTrace         = errors.New("connections differ from what the objects require")
	errNoConnections = errors.New("no connection was seen")
)

// trace runs the verb trace.
func (p *program) trace(ctx context.Context, args []string) error {
	var from, by string
	var must bool
	var long time.Duration
	var count int
	flags := newFlags("trace", traceUsage, p.diag)
	flags.StringVar(&from, "from", "", "follow only connections from this `address`, optionally with a port (ADDR:PORT)")
	flags.DurationVar(&long, "for", 10*time.Second, "how long to follow connections")
	flags.IntVar(&count, "count", 0, "end after this number of connections; 0 means no limit")
	flags.BoolVar(&must, "must", true, "compare with what the objects require; --must=false needs no objects")
	flags.StringVar(&by, "by", byNFTrace, "how to follow connections: by nftrace or conntrack")
	cfg, log, packet, err := p.parsePacketArgs(flags, args)
	if err != nil {
		return err
	}
	if cfg.Mode == config.ModeUserspace {
		return errInProcess
	}
	t := &tracing{out: p.out, mode: cfg.Mode, packet: packet}
	filter := follow.Filter{To: netip.AddrPortFrom(packet.To.Addr().Unmap(), packet.To.Port()), Protocol: protocolNumber(packet.Protocol)}
	if from != "" {
		if filter.From, err = parseSource(from, filter.To.Addr()); err != nil {
			return err
		}
	}
	if long <= 0 || count < 0 {
		return bad("--for %v --count %d: --for must be positive, and --count must not be negative", long, count)
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
	fmt.Fprintf(p.out, "following connections to %v/%s for %v\n", filter.To, packet.Protocol, long)
	ctx, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	err = f.Follow(ctx, func(packet *follow.Packet) bool {
		t.connection(packet)
		return count == 0 || t.seen < count
	})
	if n := f.Overrun(); n != 0 {
		fmt.Fprintf(p.out, "note: the kernel dropped messages; connections may be missing or incomplete\n")
	}
	if err != nil {
		return err
	}
	return t.summary()
}

// follower returns a follower for --by.
func follower(by string, filter follow.Filter, diag io.Writer) (follow.Follower, error) {
	var f follow.Follower
	var err error
	if by == byNFTrace {
		if f, err = follow.NFTrace(filter); errors.Is(err, errors.ErrUnsupported) {
			fmt.Fprintf(diag, "nodeproxy trace: %v; continuing with --by conntrack, which does not show refused or dropped connections\n", err)
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

// protocolNumber returns the protocol's IPPROTO number.
func protocolNumber(p v1.Protocol) uint8 {
	switch p {
	case v1.ProtocolUDP:
		return unix.IPPROTO_UDP
	case v1.ProtocolSCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}

// localAddresses returns the addresses of all interfaces.
func localAddresses() ([]netip.Addr, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	defer nl.Close()
	list, err := whole(func() ([]netlink.Addr, error) { return nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("cannot list the addresses: %w", err)
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

	known                   map[netip.AddrPort]bool // the sources that were seen
	endpoints               map[netip.AddrPort]int  // how many connections each got
	seen, agreed            int
	forwarded, refused, not int
}

// connection prints the outcome of a connection's first packet. It ignores later packets of
// the same connection.
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
		printLine(t.out, "kernel: %s", line)
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
	printLine(t.out, "must: %v: %s", v.Action, v.Rule)
	writeAffinity(t.out, "must: ", v)
	if err != nil {
		for _, e := range v.Endpoints {
			fmt.Fprintf(t.out, "must: endpoint %v, %s\n", e.Addr, sourceKept(v.MasqueradeTo(e)))
		}
		printLine(t.out, "DIFFERS: %v", err)
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
		return outside // the interface is gone
	}
	return name
}

// summary prints the number of connections of each endpoint, and the last line.
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
		return errNoConnections
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

// history holds the snapshots of the last seconds. The agent may bring a change into effect
// a little before or after trace receives it.
type history struct {
	live   *liveWorld
	list   []moment  // the newest last
	waited time.Time // when judge last waited for a change
}

type moment struct {
	*ruleset.Snapshot
	until time.Time // the start of the next one, zero for the newest
}

// behind is how long the kernel may still apply an earlier state of the objects. ahead is how
// long to wait for a change that the agent may have received already. The agent's
// --min-sync-period is a second by default.
const (
	behind = 3 * time.Second
	ahead  = time.Second
)

func newHistory(live *liveWorld) *history {
	return &history{live: live, list: []moment{{Snapshot: live.engine.Snapshot()}}}
}

// judge calls fn with the present snapshot. While fn returns an error, judge calls it with
// earlier snapshots, and then with new ones that arrive soon. It returns the results of fn
// for the snapshot that fn accepted, or else for the present one.
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

// add appends the present snapshot.
func (h *history) add() {
	h.list[len(h.list)-1].until = time.Now()
	h.list = append(h.list, moment{Snapshot: h.live.engine.Snapshot()})
}

// ownsChain reports whether the agent writes the step's chain of nf_tables in a mode.
func ownsChain(mode string, s follow.Step) bool {
	if mode == config.ModeNFTables {
		return s.Table == nftables.DefaultTable || s.Table == nftables.DefaultTable+"-shadow"
	}
	return strings.HasPrefix(s.Chain, "KUBE-") // also in mode ipvs
}
