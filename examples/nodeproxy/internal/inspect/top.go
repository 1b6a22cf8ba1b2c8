package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
)

const topLong = `Shows the traffic of each Service port, from the counters in the kernel of the network
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

type topOptions struct {
	interval time.Duration
	once     bool
	output   string
	view     view
}

// TopCommand returns the verb top.
func TopCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{Use: "top [flags]", Short: "show each Service's traffic", Long: topLong}
	var o topOptions
	flags := p.AddFlags(c)
	flags.DurationVar(&o.interval, "interval", 2*time.Second, "how often to read the counters")
	flags.BoolVar(&o.once, "once", false, "print the rates of one interval and exit")
	flags.StringVarP(&o.output, "output", "o", "text", "with --once: text or json")
	flags.StringVar(&o.view.sort, "sort", byConnections, "one of "+strings.Join(columnNames(), ", "))
	flags.StringVar(&o.view.filter, "filter", "", "show only Service ports whose names contain this `text`")
	cli.Complete(c, "output", "text", "json")
	cli.Complete(c, "sort", columnNames()...)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := cli.Configure(flags, 0)
		if err != nil {
			return err
		}
		return top(c.Context(), p, cfg, o)
	}
	return c
}

// top runs the verb top.
func top(ctx context.Context, p *cli.Program, cfg *config.Config, o topOptions) error {
	switch {
	case !slices.Contains(columnNames(), o.view.sort):
		return cli.Bad("--sort %q is not %s", o.view.sort, strings.Join(columnNames(), ", "))
	case o.output != "text" && o.output != "json":
		return cli.Bad("--output %q is neither text nor json", o.output)
	case o.output == "json" && !o.once:
		return cli.Bad("--output json needs --once")
	case o.interval < 100*time.Millisecond:
		return cli.Bad("--interval %v is less than 100ms", o.interval)
	}
	read := func() (sample, error) { return readTraffic(ctx, cfg.Mode) }
	first, err := read()
	if err != nil {
		return err
	}
	if !o.once {
		out, ok := p.Out.(*os.File)
		if !ok || !term.IsTerminal(int(os.Stdin.Fd())) || !term.IsTerminal(int(out.Fd())) {
			return errors.New("standard input and output are not a terminal; --once works without one")
		}
		s := &screen{view: o.view, mode: cfg.Mode, every: o.interval}
		return s.live(ctx, os.Stdin, out, first, read)
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
	rows := o.view.rows(first, last)
	if o.output == "json" {
		e := json.NewEncoder(p.Out)
		e.SetIndent("", "  ")
		return e.Encode(document{Mode: cfg.Mode, Seconds: last.at.Sub(first.at).Seconds(), Services: rows})
	}
	_, err = io.WriteString(p.Out, plain(rows))
	return err
}
