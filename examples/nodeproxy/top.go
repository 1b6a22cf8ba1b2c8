package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"time"

	"golang.org/x/term"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/toptable"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const topUsage = `Usage: nodeproxy top [flags]

Shows the traffic of each Service port, from the counters in the kernel of the network
namespace it runs in: beside a running agent, or without one. It needs no objects.
READY is the number of endpoints that get new connections. REFUSED counts packets to
Services without endpoints. DROPPED counts packets from sources that are not allowed,
and packets for which this node has no endpoint. A dash means that the mode's kernel
does not count the value. Connections to NodePorts at loopback addresses that the
agent's process serves are not counted.

Keys: c, b, r, e, d and n sort by connections, bytes, ready endpoints, refused, dropped
or name; the same key again reverses the order. / filters by a part of the name, and Esc
shows all. The arrow keys scroll. q quits.

`

// topOptions are the flags of top.
type topOptions struct {
	interval time.Duration
	once     bool
	output   string
}

// top runs the verb top.
func (p *program) top(ctx context.Context, args []string) error {
	var o topOptions
	view := toptable.View{}
	flags := newFlags("top", topUsage, p.diag)
	flags.DurationVar(&o.interval, "interval", 2*time.Second, "how often to read the counters")
	flags.BoolVar(&o.once, "once", false, "print the rates of one interval and exit")
	flags.StringVarP(&o.output, "output", "o", "text", "with --once: text or json")
	flags.StringVar(&view.Sort, "sort", toptable.ByConnections, "connections, bytes, ready, refused, dropped or name")
	flags.StringVar(&view.Filter, "filter", "", "show only Service ports whose names contain this `text`")
	cfg, err := parse(flags, args, 0)
	if err != nil {
		return err
	}
	switch {
	case !toptable.Sorts(view.Sort):
		return bad("--sort %q is not connections, bytes, ready, refused, dropped or name", view.Sort)
	case o.output != "text" && o.output != "json":
		return bad("--output %q is neither text nor json", o.output)
	case o.output == "json" && !o.once:
		return bad("--output json needs --once")
	case o.interval < 100*time.Millisecond:
		return bad("--interval %v is less than 100ms", o.interval)
	}
	read := func() (toptable.Sample, error) { return readTraffic(ctx, cfg.Mode) }
	first, err := read()
	if err != nil {
		return err
	}
	if !o.once {
		in, out, ok := terminal(p.out)
		if !ok {
			return errors.New("standard input and output are not a terminal; --once works without one")
		}
		return toptable.Live(ctx, in, out, cfg.Mode, o.interval, view, first, read)
	}
	select {
	case <-time.After(o.interval):
	case <-ctx.Done():
		return nil
	}
	last, err := read()
	if err != nil {
		return err
	}
	rows := view.Rows(first, last)
	if o.output == "json" {
		e := json.NewEncoder(p.out)
		e.SetIndent("", "  ")
		return e.Encode(toptable.Document{Mode: cfg.Mode, Seconds: last.At.Sub(first.At).Seconds(), Services: rows})
	}
	_, err = io.WriteString(p.out, toptable.Plain(rows))
	return err
}

// terminal returns the terminal that the program is used from.
func terminal(w io.Writer) (in, out *os.File, ok bool) {
	out, ok = w.(*os.File)
	return os.Stdin, out, ok && term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(out.Fd()))
}

// readTraffic reads the counters in the kernel.
func readTraffic(ctx context.Context, mode string) (s toptable.Sample, err error) {
	var t *ruleset.Traffic
	switch mode {
	case config.ModeNFTables:
		if t, err = nftables.Traffic(ctx, nftables.Config{}); err == nil {
			s.Ready, err = nftables.Ready(ctx, nftables.Config{})
		}
	case config.ModeIPTables:
		t, err = iptables.Traffic(ctx, iptables.Config{})
	case config.ModeIPVS:
		t, err = ipvs.Traffic(ctx, ipvs.Config{})
	case config.ModeUserspace:
		return s, errInProcess
	default:
		err = fmt.Errorf("--proxy-mode %s has no counters", mode)
	}
	switch {
	case errors.Is(err, ruleset.ErrNoRules):
		return s, fmt.Errorf("mode %s has no rules in this network namespace: %w", mode, err)
	case errors.Is(err, fs.ErrPermission):
		return s, fmt.Errorf("cannot read the counters of mode %s without CAP_NET_ADMIN in this network namespace; run top as root: %w", mode, err)
	case err != nil:
		return s, err
	case t.Known == 0:
		return s, fmt.Errorf("the rules of mode %s have no counters: an earlier version of the agent wrote them", mode)
	}
	if err := addSockets(ctx, t, s.Ready); err != nil {
		return s, err
	}
	s.At, s.Known = time.Now(), t.Known
	s.Counters = map[toptable.Name]ruleset.Counters{}
	for k, c := range t.Services {
		s.Counters[toptable.NameOf(k)] = c
	}
	for d, c := range t.Unnamed {
		family := tracker.FamilyOf(d.Addr.Addr())
		s.Counters[toptable.Name{Service: d.Addr.String(), Protocol: string(d.Protocol), Family: family.String()}] = c
	}
	return s, nil
}

// addSockets adds the connections that --socket-lb translated, if it is in effect and the maps
// may be read, to those of the Services in t and ready.
func addSockets(ctx context.Context, t *ruleset.Traffic, ready map[tracker.Key]int) error {
	services := maps.Clone(ready)
	if services == nil {
		services = map[tracker.Key]int{}
	}
	for k := range t.Services {
		services[k] = 0
	}
	sockets, err := socketlb.Traffic(ctx, socketlb.Config{}, maps.Keys(services))
	switch {
	case errors.Is(err, ruleset.ErrNoRules), errors.Is(err, fs.ErrPermission):
		return nil
	case err == nil:
		addTraffic(t, sockets)
	}
	return err
}
