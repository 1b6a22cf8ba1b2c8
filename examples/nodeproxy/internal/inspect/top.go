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

// TopCommand returns the verb top.
func TopCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{Use: "top [flags]", Short: "show each Service's traffic", Long: topLong}
	var s screen
	flags := p.AddFlags(c)
	flags.DurationVar(&s.every, "interval", 2*time.Second, "how often to read the counters")
	once := flags.Bool("once", false, "print the rates of one interval and exit")
	output := flags.StringP("output", "o", "text", "with --once: text or json")
	flags.StringVar(&s.sort, "sort", byConnections, "one of "+strings.Join(columnNames(), ", "))
	flags.StringVar(&s.filter, "filter", "", "show only Service ports whose names contain this `text`")
	cli.Complete(c, "output", "text", "json")
	cli.Complete(c, "sort", columnNames()...)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := cli.Configure(flags, 0)
		switch {
		case err != nil:
			return err
		case !slices.Contains(columnNames(), s.sort):
			return cli.Bad("--sort %q is not %s", s.sort, strings.Join(columnNames(), ", "))
		case *output != "text" && *output != "json":
			return cli.Bad("--output %q is neither text nor json", *output)
		case *output == "json" && !*once:
			return cli.Bad("--output json needs --once")
		case s.every < 100*time.Millisecond:
			return cli.Bad("--interval %v is less than 100ms", s.every)
		}
		s.mode = cfg.Mode
		return s.top(c.Context(), p.Out, *once, *output == "json")
	}
	return c
}

// top runs the verb top.
func (s *screen) top(ctx context.Context, w io.Writer, once, asJSON bool) error {
	read := func() (sample, error) { return readTraffic(ctx, s.mode) }
	first, err := read()
	if err != nil {
		return err
	}
	if !once {
		out, ok := w.(*os.File)
		if !ok || !term.IsTerminal(int(os.Stdin.Fd())) || !term.IsTerminal(int(out.Fd())) {
			return errors.New("standard input and output are not a terminal; --once works without one")
		}
		return s.live(ctx, os.Stdin, out, first, read)
	}
	select {
	case <-time.After(s.every):
	case <-ctx.Done():
		return nil
	}
	last, err := read()
	if err != nil {
		return err
	}
	rows := s.rows(first, last)
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(struct {
			Mode     string  `json:"mode"`
			Seconds  float64 `json:"seconds"` // between the two samples
			Services []row   `json:"services"`
		}{s.mode, last.at.Sub(first.at).Seconds(), rows})
	}
	_, err = io.WriteString(w, plain(rows))
	return err
}
