package inspect

import (
	"cmp"
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

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/userspace/vip"
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

// TraceCommand returns the verb trace.
func TraceCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{Use: traceUse, Short: traceShort, Long: traceLong}
	t := &tracing{}
	flags := p.AddFlags(c)
	flags.StringVar(&t.from, "from", "", "follow only connections from this `address`, optionally with a port (ADDR:PORT)")
	flags.DurationVar(&t.long, "for", 10*time.Second, "how long to follow connections")
	flags.IntVar(&t.count, "count", 0, "end after this number of connections; 0 means no limit")
	flags.BoolVar(&t.must, "must", true, "compare with what the objects require; --must=false needs no objects")
	flags.StringVar(&t.by, "by", byNFTrace, "how to follow connections: by nftrace or conntrack")
	cli.Complete(c, "by", byNFTrace, byConntrack)
	c.RunE = func(c *cobra.Command, _ []string) error { return t.trace(c.Context(), p, flags) }
	return c
}

// trace runs the verb trace.
func (t *tracing) trace(ctx context.Context, p *cli.Program, flags *config.Flags) error {
	cfg, log, packet, err := packetArgs(p, flags, 1)
	if err != nil {
		return err
	}
	if cfg.Mode == config.ModeUserspace {
		return errInProcess
	}
	packet.To = netip.AddrPortFrom(packet.To.Addr().Unmap(), packet.To.Port())
	var from netip.AddrPort
	if t.from != "" {
		if from, err = parseSource(t.from, packet.To.Addr()); err != nil {
			return err
		}
	}
	if t.long <= 0 || t.count < 0 {
		return cli.Bad("--for %v --count %d: --for must be positive, and --count must not be negative", t.long, t.count)
	}
	if t.by != byNFTrace && t.by != byConntrack {
		return cli.Bad("--by %q is neither nftrace nor conntrack", t.by)
	}
	t.out, t.mode, t.packet = p.Out, cfg.Mode, packet
	if t.must {
		if t.live, err = objects.Watch(ctx, cfg, log); err != nil {
			return err
		}
		defer t.live.Close()
		t.moments = []moment{{Snapshot: t.live.Engine.Snapshot()}}
	}
	if t.packet.NodeAddresses, err = localAddresses(); err != nil {
		return err
	}
	f, err := follow(packet, from, t.by == byNFTrace)
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w; trace needs CAP_NET_ADMIN in this network namespace: run it as root", err)
	}
	if err != nil && t.by == byNFTrace {
		fmt.Fprintf(p.Diag, "nodeproxy trace: %v; continuing with --by conntrack, which does not show refused or dropped connections\n", err)
		f, err = follow(packet, from, false)
	}
	if err != nil {
		return err
	}
	defer f.close()
	printLine(p.Out, "following connections to %v/%s for %v", packet.To, packet.Protocol, t.long)
	return t.run(ctx, f)
}

// localAddresses returns all of the node's own addresses.
func localAddresses() ([]netip.Addr, error) {
	a, err := vip.New()
	if err != nil {
		return nil, err
	}
	defer a.Close()
	return a.Own()
}

type tracing struct {
	from, by string // the flags
	must     bool
	long     time.Duration
	count    int

	out    io.Writer
	mode   string
	packet ruleset.Packet // the destination, with the node's addresses
	live   *objects.Live  // nil if nothing is compared
	// moments are the snapshots of the last seconds, the newest last.
	moments []moment

	pending []*connection // those to print; the first may agree with the next change of the objects
	printed []*connection
	differ  int // the number of printed connections that do
}

type moment struct {
	*ruleset.Snapshot
	until time.Time // the start of the next one, zero for the newest
}

const (
	// behind is how long the kernel may still apply an earlier state of the objects. ahead is how long to wait
	// for a change that the agent may have received already. The agent's --min-sync-period may be a second, as
	// kube-proxy's is by default.
	behind = 3 * time.Second
	ahead  = time.Second
	// replyTimeout is how long to wait for the answers to the last connections. An endpoint on a busy node may
	// need more than a second.
	replyTimeout = 3 * time.Second
)

// run prints connections for a time, and then the summary.
func (t *tracing) run(ctx context.Context, f *follower) error {
	ctx, cancel := context.WithTimeout(ctx, t.long)
	defer cancel()
	for ctx.Err() == nil && !t.full() {
		if err := f.receive(); err != nil {
			return err
		}
		t.print(f.take(idle))
	}
	// Without further messages the last outcomes count as known, and the last answers are missing.
	t.print(f.take(idle / 10))
	for end := time.Now().Add(replyTimeout); time.Now().Before(end) && (len(t.pending) != 0 && !t.full() || t.unanswered() != 0); {
		if err := f.receive(); err != nil {
			return err
		}
		t.print(nil)
	}
	if f.overrun {
		printLine(t.out, "note: the kernel dropped messages; connections may be missing or incomplete")
	}
	return t.summary()
}

// full reports whether all connections that were asked for are printed.
func (t *tracing) full() bool { return t.count != 0 && len(t.printed) >= t.count }

// print prints connections in their order. One that differs from the objects waits for the next change of the objects.
func (t *tracing) print(done []*connection) {
	if t.live != nil {
		select {
		case <-t.live.Changed:
			t.moments[len(t.moments)-1].until = time.Now()
			t.moments = append(t.moments, moment{Snapshot: t.live.Engine.Snapshot()})
		default:
		}
		t.moments = slices.DeleteFunc(t.moments, func(m moment) bool { return !m.until.IsZero() && time.Since(m.until) > behind })
	}
	for _, c := range done {
		c.describe(t.mode)
	}
	t.pending = append(t.pending, done...)
	for len(t.pending) != 0 && !t.full() && t.connection(t.pending[0]) {
		t.pending = t.pending[1:]
	}
}

// connection prints the outcome of a connection's first packet. It returns false if it is too early to compare it.
func (t *tracing) connection(c *connection) bool {
	packet := t.packet
	packet.From, packet.InInterface = c.from.Addr(), t.inInterface(c)
	var v ruleset.Verdict
	var differs error
	for _, m := range t.moments { // the newest verdict of those that agree, or else of all
		now := m.Trace(packet)
		if err := c.agrees(now); err == nil || differs != nil || v.Action == 0 {
			v, differs = now, err
		}
	}
	if differs != nil && time.Since(c.seen) < ahead {
		return false
	}
	came := ""
	switch {
	case c.in > 0:
		came = ", in by " + packet.InInterface
	case c.in == 0:
		came = ", from this node"
	}
	fmt.Fprintln(t.out)
	printLine(t.out, "connection: %v to %v/%s%s", c.from, c.to, packet.Protocol, came)
	for _, line := range c.lines {
		printLine(t.out, "kernel: %s", line)
	}
	t.printed = append(t.printed, c)
	if t.live == nil {
		return true
	}
	printLine(t.out, "must: %v: %s", v.Action, v.Rule)
	writeAffinity(t.out, "must: ", v)
	writeWhyEmpty(t.out, "must: ", t.live.World, v)
	if differs != nil {
		for _, e := range v.Endpoints {
			printLine(t.out, "must: endpoint %v, %s", e.Addr, sourceKept(v.MasqueradeTo(e)))
		}
		printLine(t.out, "DIFFERS: %v", differs)
		t.differ++
		return true
	}
	printLine(t.out, "agrees")
	return true
}

// inInterface returns the name of the interface that a packet came in by, as [ruleset.Packet] has it.
func (t *tracing) inInterface(c *connection) string {
	if c.in == 0 || c.in == unknown && slices.Contains(t.packet.NodeAddresses, c.from.Addr()) {
		return ""
	}
	return cmp.Or(interfaceName(c.in), outside)
}

// summary prints the number of connections of each endpoint, and the last line.
func (t *tracing) summary() error {
	actions, replies := map[ruleset.Action]int{}, map[netip.AddrPort]map[reply]int{}
	for _, c := range t.printed {
		if actions[c.action]++; c.action != ruleset.ActionForward {
			continue
		}
		if replies[c.lastTo] == nil {
			replies[c.lastTo] = map[reply]int{}
		}
		replies[c.lastTo][c.reply]++
	}
	if len(replies) > 0 {
		fmt.Fprintln(t.out)
	}
	for _, e := range slices.SortedFunc(maps.Keys(replies), netip.AddrPort.Compare) {
		got, list := 0, []string{}
		for r, what := range [...]string{"answered", "reset by the endpoint", "silent"} {
			if n := replies[e][reply(r)]; n != 0 {
				got, list = got+n, append(list, fmt.Sprint(n, " ", what))
			}
		}
		printLine(t.out, "endpoint %v got %d of %d: %s", e, got, len(t.printed), strings.Join(list, ", "))
	}
	fmt.Fprintln(t.out)
	if len(t.printed) == 0 {
		printLine(t.out, "no new connection to %v was seen", t.packet.To)
		return errNoConnections
	}
	forwarded, refused := actions[ruleset.ActionForward], actions[ruleset.ActionReject]
	line := fmt.Sprintf("%s: %d forwarded, %d refused, %d neither", count(len(t.printed), "connection"), forwarded, refused, len(t.printed)-forwarded-refused)
	switch {
	case t.differ != 0:
		printLine(t.out, "%s; kernel and objects DIFFER for %d", line, t.differ)
		return errTrace
	case t.live != nil:
		line += "; kernel and objects AGREE"
	}
	printLine(t.out, "%s", line)
	if n := t.unanswered(); n != 0 {
		printLine(t.out, "%d of them not answered: look at the endpoints above, and at what drops packets beyond this node", n)
		return errUnanswered
	}
	return nil
}

// unanswered returns the number of forwarded connections that were not answered.
func (t *tracing) unanswered() (n int) {
	for _, c := range t.printed {
		if c.action == ruleset.ActionForward && c.reply != answered {
			n++
		}
	}
	return n
}
