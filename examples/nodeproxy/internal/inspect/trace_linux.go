package inspect

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

	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/inspect/follow"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
)

const traceLong = `Follows real connections to a destination through the kernel, in the network namespace
it runs in. For each connection it prints the chains that the first packet met, the
endpoint that the connection got or the rule that stopped it, and whether that agrees
with the objects. It reads the objects from where run reads them, with the same flags.
For each endpoint it prints how many connections were answered, were reset by the
endpoint, or stayed silent, which means that the packet or its answer was lost after
this node. The last line reports whether all connections agree. The exit status is 1 if
they do not, if no connection was seen, or if an endpoint reset one or stayed silent. The
protocol is TCP by default.

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
	errUnanswered    = errors.New("connections were forwarded and not answered")
)

type traceOptions struct {
	from, by string
	must     bool
	long     time.Duration
	count    int
}

// TraceCommand returns the verb trace.
func TraceCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{Use: traceUse, Short: traceShort, Long: traceLong}
	var o traceOptions
	flags := p.AddFlags(c)
	flags.StringVar(&o.from, "from", "", "follow only connections from this `address`, optionally with a port (ADDR:PORT)")
	flags.DurationVar(&o.long, "for", 10*time.Second, "how long to follow connections")
	flags.IntVar(&o.count, "count", 0, "end after this number of connections; 0 means no limit")
	flags.BoolVar(&o.must, "must", true, "compare with what the objects require; --must=false needs no objects")
	flags.StringVar(&o.by, "by", byNFTrace, "how to follow connections: by nftrace or conntrack")
	cli.Complete(c, "by", byNFTrace, byConntrack)
	c.RunE = func(c *cobra.Command, _ []string) error { return trace(c.Context(), p, flags, o) }
	return c
}

// trace runs the verb trace.
func trace(ctx context.Context, p *cli.Program, flags *config.Flags, o traceOptions) error {
	cfg, log, packet, err := packetArgs(p, flags, false)
	if err != nil {
		return err
	}
	if cfg.Mode == config.ModeUserspace {
		return errInProcess
	}
	t := &tracing{out: p.Out, mode: cfg.Mode, packet: packet}
	filter := follow.Filter{To: netip.AddrPortFrom(packet.To.Addr().Unmap(), packet.To.Port()), Protocol: inet.Protocol(packet.Protocol)}
	if o.from != "" {
		if filter.From, err = parseSource(o.from, filter.To.Addr()); err != nil {
			return err
		}
	}
	if o.long <= 0 || o.count < 0 {
		return cli.Bad("--for %v --count %d: --for must be positive, and --count must not be negative", o.long, o.count)
	}
	if o.by != byNFTrace && o.by != byConntrack {
		return cli.Bad("--by %q is neither nftrace nor conntrack", o.by)
	}
	if o.must {
		live, err := objects.Watch(ctx, cfg, log)
		if err != nil {
			return err
		}
		defer live.Close()
		t.expected = newHistory(live)
	}
	if t.addresses, err = localAddresses(); err != nil {
		return err
	}
	// Listen for answers before the first connection can be seen.
	events, unwatched := follow.OpenConntrack(filter)
	if unwatched == nil {
		t.replies = events
		done := make(chan struct{})
		ctx, cancel := context.WithCancel(ctx)
		go func() {
			defer close(done)
			if err := events.Run(ctx); err != nil {
				fmt.Fprintf(p.Diag, "nodeproxy trace: %v\n", err)
			}
		}()
		defer func() {
			cancel()
			<-done
			events.Close()
		}()
	}
	var f follow.Follower = events
	if o.by == byNFTrace {
		f, err = follow.NFTrace(filter)
		if err == nil {
			defer f.Close()
			if unwatched != nil {
				fmt.Fprintf(p.Diag, "nodeproxy trace: %v; continuing without what endpoints answer\n", unwatched)
			}
		} else if errors.Is(err, errors.ErrUnsupported) {
			fmt.Fprintf(p.Diag, "nodeproxy trace: %v; continuing with --by conntrack, which does not show refused or dropped connections\n", err)
			f, o.by = events, byConntrack
		}
	}
	if o.by == byConntrack {
		err = unwatched
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w; trace needs CAP_NET_ADMIN in this network namespace: run it as root", err)
	}
	if err != nil {
		return err
	}
	printLine(p.Out, "following connections to %v/%s for %v", filter.To, packet.Protocol, o.long)
	ctx, cancel := context.WithTimeout(ctx, o.long)
	defer cancel()
	err = f.Follow(ctx, func(packet *follow.Packet) bool {
		t.connection(packet)
		return o.count == 0 || t.seen < o.count
	})
	if n := f.Overrun(); n != 0 {
		printLine(p.Out, "note: the kernel dropped messages; connections may be missing or incomplete")
	}
	if err != nil {
		return err
	}
	t.awaitReplies()
	return t.summary()
}

// localAddresses returns all of the node's own addresses.
func localAddresses() ([]netip.Addr, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	defer nl.Close()
	list, err := nfnl.Whole(context.Background(), netlink.ErrDumpInterrupted, func() ([]netlink.Addr, error) { return nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("cannot list the addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range list {
		out = append(out, objects.Addr(a.IP))
	}
	return out, nil
}

type tracing struct {
	out       io.Writer
	mode      string
	packet    ruleset.Packet // the destination
	addresses []netip.Addr
	expected  *history // nil if nothing is compared

	known                   map[netip.AddrPort]bool             // the sources that were seen
	endpoints               map[netip.AddrPort][]netip.AddrPort // the sources of the connections that each got
	replies                 *follow.Conntrack                   // nil if they are not known
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
		t.known, t.endpoints = map[netip.AddrPort]bool{}, map[netip.AddrPort][]netip.AddrPort{}
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
	fmt.Fprintln(t.out)
	printLine(t.out, "connection: %v to %v/%s%s", p.From, p.To, packet.Protocol, came)
	o := t.outcome(p)
	for _, line := range o.lines {
		printLine(t.out, "kernel: %s", line)
	}
	switch {
	case o.action == ruleset.ActionForward:
		t.forwarded++
		t.endpoints[o.endpoint] = append(t.endpoints[o.endpoint], p.From)
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
	writeWhyEmpty(t.out, "must: ", t.expected.live.World, v)
	if err != nil {
		for _, e := range v.Endpoints {
			printLine(t.out, "must: endpoint %v, %s", e.Addr, sourceKept(v.MasqueradeTo(e)))
		}
		printLine(t.out, "DIFFERS: %v", err)
		return
	}
	t.agreed++
	printLine(t.out, "agrees")
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
	unanswered := 0
	for _, e := range slices.SortedFunc(maps.Keys(t.endpoints), netip.AddrPort.Compare) {
		reply, missing := t.repliesOf(e)
		unanswered += missing
		printLine(t.out, "endpoint %v got %d of %d%s", e, len(t.endpoints[e]), t.seen, reply)
	}
	fmt.Fprintln(t.out)
	switch {
	case t.seen == 0:
		printLine(t.out, "no new connection to %v was seen", t.packet.To)
		return errNoConnections
	case t.expected == nil:
		printLine(t.out, "%s: %s", count(t.seen, "connection"), t.tally())
	case t.agreed == t.seen:
		printLine(t.out, "%s: %s; kernel and objects AGREE", count(t.seen, "connection"), t.tally())
	default:
		printLine(t.out, "%s: %s; kernel and objects DIFFER for %d", count(t.seen, "connection"), t.tally(), t.seen-t.agreed)
		return errTrace
	}
	if unanswered != 0 {
		printLine(t.out, "%d of them not answered: look at the endpoints above, and at what drops packets beyond this node", unanswered)
		return errUnanswered
	}
	return nil
}

// replyTimeout is how long to wait for the answers to the last connections. An endpoint on a busy node may
// need more than a second.
const replyTimeout = 3 * time.Second

// awaitReplies waits until all connections are answered, for a while.
func (t *tracing) awaitReplies() {
	for end := time.Now().Add(replyTimeout); t.replies != nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		missing := 0
		for e := range t.endpoints {
			_, n := t.repliesOf(e)
			missing += n
		}
		if missing == 0 {
			return
		}
	}
}

// repliesOf returns what came back on the connections of an endpoint, as text that begins with a
// colon, and the number of those that were not answered.
func (t *tracing) repliesOf(endpoint netip.AddrPort) (text string, unanswered int) {
	if t.replies == nil {
		return "", 0
	}
	n := map[follow.Reply]int{}
	for _, from := range t.endpoints[endpoint] {
		n[t.replies.Of(from)]++
	}
	var parts []string
	for _, r := range []struct {
		reply follow.Reply
		text  string
	}{{follow.Answered, "answered"}, {follow.Reset, "reset by the endpoint"}, {follow.Silent, "silent"}} {
		if n[r.reply] != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[r.reply], r.text))
		}
	}
	return ": " + strings.Join(parts, ", "), n[follow.Reset] + n[follow.Silent]
}

func (t *tracing) tally() string {
	return fmt.Sprintf("%d forwarded, %d refused, %d neither", t.forwarded, t.refused, t.not)
}

// history holds the snapshots of the last seconds. The agent may bring a change into effect
// a little before or after trace receives it.
type history struct {
	live   *objects.Live
	list   []moment  // the newest last
	waited time.Time // when judge last waited for a change
}

type moment struct {
	*ruleset.Snapshot
	until time.Time // the start of the next one, zero for the newest
}

// behind is how long the kernel may still apply an earlier state of the objects. ahead is how
// long to wait for a change that the agent may have received already. The agent's
// --min-sync-period may be a second, as kube-proxy's is by default.
const (
	behind = 3 * time.Second
	ahead  = time.Second
)

func newHistory(live *objects.Live) *history {
	return &history{live: live, list: []moment{{Snapshot: live.Engine.Snapshot()}}}
}

// judge calls fn with the present snapshot. While fn returns an error, judge calls it with
// earlier snapshots, and then with new ones that arrive soon. It returns the results of fn
// for the snapshot that fn accepted, or else for the present one.
func (h *history) judge(fn func(*ruleset.Snapshot) (ruleset.Verdict, error)) (ruleset.Verdict, error) {
	select {
	case <-h.live.Changed:
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
		case <-h.live.Changed:
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
	h.list = append(h.list, moment{Snapshot: h.live.Engine.Snapshot()})
}

// ownsChain reports whether the agent writes the step's chain of nf_tables in a mode.
func ownsChain(mode string, s follow.Step) bool {
	if mode == config.ModeNFTables {
		return s.Table == nftables.DefaultTable || s.Table == nftables.DefaultTable+"-shadow"
	}
	return strings.HasPrefix(s.Chain, "KUBE-") // also in mode ipvs
}
