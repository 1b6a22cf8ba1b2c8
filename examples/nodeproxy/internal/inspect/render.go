package inspect

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const renderLong = `Prints the rules that a node would have, as "nft -f" or iptables-restore --noflush read
them, and in mode ipvs as a shell script that calls ipvsadm, ipset, ip and these. It reads the objects from where run reads them, with the same flags, and needs
neither the node nor its kernel: --hostname-override names any node, and every system
will do.

With --diff it prints what would change on the node if its objects became those of a
folder or file: what does this change of the manifests do?

	nodeproxy render --manifests main/ --hostname-override node-a --diff branch/

With "--diff kernel", as root on the node, it prints for which addresses and ports the rules
in the kernel have other endpoints than the objects: what would an agent change here? It
asks for one connection from elsewhere to each. It also names the Services that the kernel
alone has; in modes iptables and ipvs, of these, those with traffic.

It leaves out objects of --manifests that an API server would refuse, and names them.

The exit status is 1 if --diff finds differences, or if the mode cannot express some
Services, which are named.
`

// RenderCommand returns the verb render.
func RenderCommand(p *cli.Program) *cobra.Command {
	c := &cobra.Command{
		Use:   "render [flags]",
		Short: "print the rules that a node would have, or what a change of the objects does to them",
		Long:  renderLong,
	}
	flags := p.AddFlags(c)
	diff := flags.String("diff", "", "print what differs with the objects of this `folder` or file in place of those that run would read, or with the rules in the \"kernel\"")
	c.RunE = func(c *cobra.Command, _ []string) error { return render(c.Context(), p, flags, *diff) }
	return c
}

// render runs the verb render.
func render(ctx context.Context, p *cli.Program, flags *config.Flags, diff string) error {
	cfg, log, _, err := packetArgs(p, flags, 0)
	if err != nil {
		return err
	}
	if diff == theKernel {
		return diffKernel(ctx, p.Out, cfg, log)
	}
	var from *ruleset.Snapshot
	to, err := snapshot(ctx, cfg, log)
	if err == nil && diff != "" {
		changed := *cfg
		changed.Manifests = diff
		from = to
		to, err = snapshot(ctx, &changed, log)
	}
	if err != nil {
		return err
	}
	return writeRules(p.Out, log, cfg, from, to)
}

func snapshot(ctx context.Context, cfg *config.Config, log *slog.Logger) (*ruleset.Snapshot, error) {
	w, err := objects.Peek(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	w.LeaveOutRefused()
	return w.Engine.Snapshot(), nil
}

// writeRules writes the rules that lead from one ruleset to another one, or all rules if from is nil. It returns status 1
// if the rulesets differ, or if the mode cannot express some Services, which it logs.
func writeRules(out io.Writer, log *slog.Logger, cfg *config.Config, from, to *ruleset.Snapshot) error {
	var status error
	for _, families := range modes.RenderedFamilies(cfg.Mode) {
		render, err := modes.NewRenderer(cfg, families)
		if err != nil {
			return err
		}
		d := to.Delta()
		if from != nil {
			if _, err := render(from.Delta()); !ruleset.InEffect(err) {
				return err
			}
			d = to.DeltaFrom(from)
			d.Changes = slices.DeleteFunc(d.Changes, func(c ruleset.Change) bool { return !slices.Contains(families, c.Key.Family) })
		}
		text, err := render(d)
		if errors.Is(err, ruleset.ErrNeedFull) {
			printLine(out, "# %s: the rules of the node itself differ, and all are written again", names(families))
			if render, err = modes.NewRenderer(cfg, families); err != nil {
				return err
			}
			text, err = render(to.Delta())
		} else if from != nil && len(d.Changes) != 0 {
			printLine(out, "# %s: %s", names(families), changedPorts(d))
		}
		if from != nil && (text != "" || len(d.Changes) != 0) {
			status = cli.StatusError(1)
		}
		var partial *ruleset.PartialError
		if errors.As(err, &partial) {
			status, err = cli.StatusError(1), nil
			for k, why := range partial.Failed {
				log.Warn("the mode cannot express a Service", "service", k, "error", why)
			}
		}
		if err == nil {
			_, err = io.WriteString(out, text)
		}
		if err != nil {
			return err
		}
	}
	return status
}

func names(families []tracker.Family) string {
	var out []string
	for _, f := range families {
		out = append(out, f.String())
	}
	return strings.Join(out, " and ")
}

// changedPorts names the Service ports that differ.
func changedPorts(d *ruleset.Delta) string {
	var names []string
	for _, c := range d.Changes {
		sign := "~"
		switch {
		case c.Old == nil:
			sign = "+"
		case c.New == nil:
			sign = "-"
		}
		names = append(names, sign+c.Key.String())
	}
	return strings.Join(few(names, 20), " ")
}
