package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strconv"

	"github.com/spf13/pflag"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/socketlb"
)

const runUsage = `Usage: nodeproxy run [flags]

Programs the network namespace it runs in as the Services and EndpointSlices of an
API server say, or those of --manifests PATH, and follows their changes. Rules stay
in effect when it ends. What is bad in an object or document is logged and skipped.

Standard output gets a line for each change of the manifests that is in effect, or,
with an API server, for each sync that had something to do:
  synced services=2 endpoints=5 changed=1 took=412.3µs waited=1.2ms
services is the number of Services with a port to serve; endpoints that of the
endpoints this node may send to, added up over their ports in each address family;
changed that of the ports, in each address family, whose rules are different; took
the time from the start of the sync to the kernel's commit; waited the time before
that since the change was handed in (of manifests the last object, of an API server
the first); and failed, if there, the number of ports that
could not be programmed, which is tried again.

`

// newFlags returns the flags of a verb.
func newFlags(verb, usage string, diag io.Writer) *config.Flags {
	f := config.NewFlags(verb)
	help(f.FlagSet, usage, diag)
	return f
}

func help(f *pflag.FlagSet, usage string, diag io.Writer) {
	f.SetOutput(diag)
	f.Usage = func() { fmt.Fprintf(diag, "%sFlags:\n%s", usage, f.FlagUsages()) }
}

// errUsage is in errors of the command line, for which the exit status is 2.
var errUsage = errors.New("see --help")

// bad returns an errUsage.
func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), errUsage)
}

// parse reads a command line with n arguments besides flags, and what it says.
func parse(flags *config.Flags, args []string, n int) (*config.Config, error) {
	if err := flags.Parse(args); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errUsage)
	}
	if flags.NArg() != n {
		return nil, bad("%d arguments instead of %d", flags.NArg(), n)
	}
	c, err := flags.Config()
	if err != nil {
		return nil, bad("%w", err)
	}
	return c, nil
}

// run is the verb run.
func (p *program) run(ctx context.Context, args []string) error {
	cfg, err := parse(newFlags("run", runUsage, p.diag), args, 0)
	if err != nil {
		return err
	}
	log, err := p.logger(cfg)
	if err != nil {
		return err
	}
	m, err := findMode(p.modes, cfg.Mode)
	if err != nil {
		return bad("%w", err)
	}
	serves := cfg.WriteConfigTo == "" && !cfg.Cleanup && !cfg.InitOnly
	if serves && p.restrict != nil {
		// What it does it may do by starting the program anew, so nothing is said yet.
		p.restrict(log, needed(cfg), func(modules bool) {
			_ = setOOMScore(*cfg.Effective.OOMScoreAdj)
			if modules {
				m.loadModules(ctx, cfg, log)
			}
		})
	}
	for _, note := range cfg.Notes {
		log.Warn(note)
	}
	switch {
	case cfg.WriteConfigTo != "":
		if err := cfg.Write(cfg.WriteConfigTo); err != nil {
			return err
		}
		log.Info("wrote the configuration", "file", cfg.WriteConfigTo)
		return nil
	case cfg.Cleanup:
		err := leftovers(ctx, p.modes, "", cfg.Adopt, log)
		if cfg.Adopt {
			// Rules of kube-proxy's modes lead to each other's: what was held up goes now.
			err = leftovers(ctx, p.modes, "", cfg.Adopt, log)
		}
		if err := errors.Join(err, socketlb.Cleanup(ctx, socketlb.Config{})); err != nil {
			return err
		}
		log.Info("removed all rules")
		return nil
	case cfg.InitOnly:
		// Reaching for connection tracking loads its module, without which there are no
		// parameters.
		if c, err := conntrack.New(conntrack.Config{}); err == nil {
			c.Close()
		}
		err := tune(cfg, log)
		if m.setSysctls != nil {
			err = errors.Join(err, m.setSysctls(settings{Config: cfg}))
		}
		if err == nil {
			log.Info("all kernel parameters are set", "mode", cfg.Mode)
		}
		return err
	}
	if err := setOOMScore(*cfg.Effective.OOMScoreAdj); err != nil {
		log.Warn("cannot set oom-score-adj", "value", *cfg.Effective.OOMScoreAdj, "error", err)
	}
	a, err := newAgent(ctx, cfg, p.modes, p.out, log)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped while it waited for something
		}
		return err
	}
	a.logStart()
	if err = a.run(ctx); err == nil {
		log.Info("stopped; the rules stay in effect")
	}
	return err
}

// logStart tells an operator what is about to happen.
func (a *agent) logStart() {
	c := a.cfg
	from := "API server"
	if c.Manifests != "" {
		from = c.Manifests
	}
	addresses := a.tracker.Node().Addresses
	a.log.Info("serving", "version", version(), "mode", c.Mode, "families", fmt.Sprint(a.families), "source", from,
		"config", c.ConfigFile, "node", c.NodeName, "addresses", fmt.Sprint(addresses),
		"nodePortAddresses", fmt.Sprint(c.Effective.NodePortAddresses), "detectLocalMode", c.Effective.DetectLocalMode,
		"clusterCIDR", c.Effective.ClusterCIDR, "masqueradeAll", c.MasqueradeAll,
		"minSyncPeriod", c.MinSyncPeriod, "syncPeriod", c.SyncPeriod,
		"healthz", c.Effective.HealthzBindAddress, "metrics", c.Effective.MetricsBindAddress)
	if len(addresses) == 0 && c.PrimaryOnly {
		a.log.Warn("no address of this node is known, so NodePorts are not served for now")
	}
	for _, f := range a.families {
		if len(c.DetectLocal.CIDRs) != 0 && !c.DetectLocal.Detects(f) {
			a.log.Warn("--cluster-cidr has no CIDR of a family that is served: its traffic of pods is not told from other traffic", "family", f)
		}
	}
}

// version is the program's, as far as the build says.
func version() string {
	if i, ok := debug.ReadBuildInfo(); ok && i.Main.Version != "" {
		return i.Main.Version
	}
	return "(devel)"
}

// setOOMScore tells the kernel how to choose this process when memory runs out.
func setOOMScore(adj int32) error {
	return os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(adj))), 0)
}

// errConfigChanged ends an agent whose configuration file is another than that
// which it was started with. Whoever runs it starts it anew.
var errConfigChanged = errors.New("the configuration file has changed; start again")

// watchConfig returns an error when the configuration file says something else.
func (a *agent) watchConfig(ctx context.Context) error {
	path := a.cfg.ConfigFile
	if path == "" {
		return nil
	}
	w, err := manifests.NewWatcher(path)
	if err != nil {
		return err
	}
	defer w.Close()
	was := a.cfg.FileText
	for {
		// A file that is gone or cannot be read for now is no other configuration.
		if now, err := os.ReadFile(path); err == nil && !bytes.Equal(was, now) {
			return errConfigChanged
		}
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
}
