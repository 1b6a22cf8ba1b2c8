package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"

	"github.com/spf13/cobra"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/conntrack/reset"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/modes"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/runner/complaint"
)

const runLong = `Reads Services and EndpointSlices from an API server, or from --manifests PATH, and
programs the network namespace it runs in. It follows their changes. The rules stay
in effect when it ends. Invalid parts of objects and documents are logged and skipped.

Run prints a line for each change of the manifests that is in effect. With an API server
it prints one for the first sync that had something to do, and then at most one a minute,
for all syncs since the last line; --log-every-sync prints one for each:
  synced services=2 endpoints=5 changed=1 took=412.3µs waited=1.2ms

  services   Services with a port to serve
  endpoints  endpoints that this node may send to, summed over the Service ports in
             each address family
  changed    Service ports, in each address family, whose rules differ from before
  took       the time from the start of the sync to the kernel's commit; stale UDP flows
             are deleted afterwards, and no sync waits for that
  waited     the time from the change to the start of the sync; it counts from the last
             object of a change of the manifests, or from the first one of an API server
  syncs      syncs that the line is about, if several: changed is a sum then, and took
             and waited are the longest times
  failed     Service ports that could not be programmed and will be retried; missing
             if 0. 20 such lines are printed, and then one in 10 seconds
With --logging-format=json the line is an entry of the log with these fields.
`

// Command returns the verb run.
func Command(p *cli.Program) *cobra.Command {
	c := &cobra.Command{
		Use:   "run [flags]",
		Short: "serve the objects of an API server or, with --manifests PATH, of files",
		Long:  runLong,
	}
	flags := p.AddFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error { return run(c.Context(), p, flags) }
	flags.AsKubeProxy = p.AsKubeProxy
	if p.AsKubeProxy {
		if err := flags.Set("adopt-from-kube-proxy", "true"); err != nil {
			panic(err) // it is a flag of type bool
		}
	}
	return c
}

// run runs the verb run with parsed flags.
func run(ctx context.Context, p *cli.Program, flags *config.Flags) error {
	cfg, err := cli.Configure(flags, 0)
	if err != nil {
		return err
	}
	if p.AsKubeProxy && cfg.Adopt {
		cfg.Notes = append(cfg.Notes, "called as kube-proxy: --adopt-from-kube-proxy is on by default, and removes the rules that kube-proxy left")
	}
	log, err := p.Logger(cfg)
	if err != nil {
		return err
	}
	if err = runWith(ctx, p, cfg, log); err != nil && cfg.JSON() {
		log.Error("nodeproxy run failed", "error", err)
		return cli.LoggedError{Err: err}
	}
	return err
}

// runWith runs the verb run with a configuration.
func runWith(ctx context.Context, p *cli.Program, cfg *config.Config, log *slog.Logger) error {
	available := p.Modes(cfg)
	m, err := modes.Find(available, cfg.Mode)
	if err != nil {
		return cli.Bad("%w", err)
	}
	serves := cfg.WriteConfigTo == "" && !cfg.Cleanup && !cfg.InitOnly
	var flavor modes.Flavor
	if serves || cfg.InitOnly {
		flavor = modes.ChooseFlavor(ctx, cfg)
		cfg.Flavor = flavor.Name
	}
	if serves && p.Restrict != nil {
		// Log after it: it may execute the program again.
		p.Restrict(log, Needed(cfg), func(modules bool) {
			_ = setOOMScore(*cfg.Effective.OOMScoreAdj)
			if modules {
				m.LoadModules(ctx, cfg, log)
			}
		})
	}
	for _, note := range cfg.Notes {
		log.Warn(note)
	}
	flavor.Log(log)
	switch {
	case cfg.WriteConfigTo != "":
		if err := cfg.Write(cfg.WriteConfigTo); err != nil {
			return err
		}
		log.Info("wrote the configuration", "file", cfg.WriteConfigTo)
		return nil
	case cfg.Cleanup:
		all, refused := modes.Cleanable(ctx, available, cfg, log)
		err := modes.Leftovers(ctx, all, "", cfg.Adopt, log)
		if cfg.Adopt {
			// The rules of kube-proxy's modes refer to each other's chains and sets. The
			// first pass leaves out what is still in use.
			err = modes.Leftovers(ctx, all, "", cfg.Adopt, log)
		}
		err = errors.Join(err, refused, modes.Missing(socketlb.Cleanup(ctx, socketlb.Config{}), log), modes.Missing(reset.Cleanup(ctx, reset.Config{}), log))
		if err != nil {
			return err
		}
		log.Info("removed all rules")
		return nil
	case cfg.InitOnly && !m.TracksConnections:
		log.Info("the mode needs no kernel parameters", "mode", cfg.Mode)
		return nil
	case cfg.InitOnly:
		// Opening connection tracking loads its module, which has the parameters.
		if c, err := conntrack.New(ctx, conntrack.Config{}); err == nil {
			c.Close()
		}
		err := tune(cfg, log)
		if m.SetSysctls != nil {
			err = errors.Join(err, m.SetSysctls(ctx, modes.Settings{Config: cfg}))
		}
		err = errors.Join(err, modes.ResetSysctls(ctx, cfg.Mode, log))
		if err == nil {
			log.Info("all kernel parameters are set", "mode", cfg.Mode)
		}
		return err
	}
	if err := setOOMScore(*cfg.Effective.OOMScoreAdj); err != nil {
		log.Warn("cannot set oom-score-adj", "value", *cfg.Effective.OOMScoreAdj, "error", err)
	}
	a, err := New(ctx, cfg, available, p.Out, log)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped while newAgent waited for something
		}
		return err
	}
	a.logStart()
	switch err = a.Run(ctx); {
	case err != nil:
	case cfg.Mode == config.ModeUserspace:
		log.Info("stopped; Services are not served until the next start")
	default:
		log.Info("stopped; the rules stay in effect")
	}
	return err
}

// logStart logs the configuration for the operator.
func (a *Agent) logStart() {
	c := a.Config
	from := "API server"
	if c.Manifests != "" {
		from = c.Manifests
	}
	addresses := a.Tracker.Node().Addresses
	a.Log.Info("serving", "version", cli.Version(), "mode", c.Mode, "families", fmt.Sprint(a.families), "source", from,
		"config", c.ConfigFile, "node", c.NodeName, "addresses", fmt.Sprint(addresses),
		"nodePortAddresses", fmt.Sprint(c.Effective.NodePortAddresses), "detectLocalMode", c.Effective.DetectLocalMode,
		"clusterCIDR", c.Effective.ClusterCIDR, "masqueradeAll", c.MasqueradeAll,
		"minSyncPeriod", c.MinSyncPeriod, "syncPeriod", c.SyncPeriod,
		"healthz", c.Effective.HealthzBindAddress, "metrics", c.Effective.MetricsBindAddress)
	if a.localhost != nil {
		a.Log.Info("this process serves NodePorts at loopback addresses: connections to them end with it", "families", fmt.Sprint(c.LoopbackFamilies(a.families)))
	}
	if len(addresses) == 0 && c.PrimaryOnly {
		a.Log.Warn("NodePorts are not served yet: the node's addresses are not known")
	}
	for _, f := range a.families {
		if len(c.DetectLocal.CIDRs) != 0 && !c.DetectLocal.Detects(f) {
			a.Log.Warn("--cluster-cidr has no CIDR of a served address family: traffic of pods is not recognized in it", "family", f)
		}
	}
}

// errConfigChanged ends an agent whose configuration file changed since it started. Its
// supervisor restarts it.
var errConfigChanged = errors.New("configuration file changed: restart needed")

// watchConfig returns errConfigChanged when the configuration has changed by its file. While the file
// is invalid, the agent goes on: one that exits would not start again, and a ConfigMap changes on
// all nodes within a minute.
func (a *Agent) watchConfig(ctx context.Context) error {
	path := a.Config.ConfigFile
	if path == "" {
		return nil
	}
	w, err := manifests.NewWatcher(path)
	if err != nil {
		return err
	}
	defer w.Close()
	was := a.Config.FileText
	for {
		// A missing or unreadable file does not count as a change.
		if now, err := os.ReadFile(path); err == nil && !bytes.Equal(was, now) {
			was = now
			if a.configChanged(now) {
				return errConfigChanged
			}
		}
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
}

// configChanged reports whether the configuration differs with a new content of its file. It logs
// why if it does not.
func (a *Agent) configChanged(text []byte) bool {
	next, err := a.Config.WithFile(text)
	a.metrics.ConfigInvalid(err != nil)
	switch {
	case err != nil:
		a.Log.Error("the changed configuration file is invalid: its previous content stays in effect", "error", err)
		a.nodeEvent(true, reasonConfigInvalid, complaint.Text(err.Error()))
		return false
	case reflect.DeepEqual(next.Effective, a.Config.Effective):
		a.Log.Info("the configuration file changed without effect")
		return false
	}
	return true
}
