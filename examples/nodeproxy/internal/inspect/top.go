package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/inspect/toptable"
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
	view     toptable.View
}

// TopCommand returns the verb top.
func TopCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{Use: "top [flags]", Short: "show each Service's traffic", Long: topLong}
	var o topOptions
	flags := p.AddFlags(c)
	flags.DurationVar(&o.interval, "interval", 2*time.Second, "how often to read the counters")
	flags.BoolVar(&o.once, "once", false, "print the rates of one interval and exit")
	flags.StringVarP(&o.output, "output", "o", "text", "with --once: text or json")
	flags.StringVar(&o.view.Sort, "sort", toptable.ByConnections, "connections, bytes, ready, refused, dropped or name")
	flags.StringVar(&o.view.Filter, "filter", "", "show only Service ports whose names contain this `text`")
	cli.Complete(c, "output", "text", "json")
	cli.Complete(c, "sort", toptable.ByConnections, "bytes", "ready", "refused", "dropped", "name")
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
	view := o.view
	switch {
	case !toptable.Sorts(view.Sort):
		return cli.Bad("--sort %q is not connections, bytes, ready, refused, dropped or name", view.Sort)
	case o.output != "text" && o.output != "json":
		return cli.Bad("--output %q is neither text nor json", o.output)
	case o.output == "json" && !o.once:
		return cli.Bad("--output json needs --once")
	case o.interval < 100*time.Millisecond:
		return cli.Bad("--interval %v is less than 100ms", o.interval)
	}
	read := func() (toptable.Sample, error) { return readTraffic(ctx, cfg.Mode) }
	first, err := read()
	if err != nil {
		return err
	}
	if !o.once {
		in, out, ok := terminal(p.Out)
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
		e := json.NewEncoder(p.Out)
		e.SetIndent("", "  ")
		return e.Encode(toptable.Document{Mode: cfg.Mode, Seconds: last.At.Sub(first.At).Seconds(), Services: rows})
	}
	_, err = io.WriteString(p.Out, toptable.Plain(rows))
	return err
}

// terminal returns the terminal that the program is used from.
func terminal(w io.Writer) (in, out *os.File, ok bool) {
	out, ok = w.(*os.File)
	return os.Stdin, out, ok && term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(out.Fd()))
}
