package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/socketlb"
)

const runUsage = `Usage: nodeproxy run [flags]

Reads Services and EndpointSlices from an API server, or from --manifests PATH, and
programs the network namespace it runs in. It follows their changes. The rules stay
in effect when it ends. Invalid parts of objects and documents are logged and skipped.

Run prints a line for each change of the manifests that is in effect or, with an API
server, for each sync that had something to do:
  synced services=2 endpoints=5 changed=1 took=412.3µs waited=1.2ms

  services   Services with a port to serve
  endpoints  endpoints that this node may send to, summed over the Service ports in
             each address family
  changed    Service ports, in each address family, whose rules differ from before
  took       the time from the start of the sync to the kernel's commit
  waited     the time from the change to the start of the sync; it counts from the last
             object of a change of the manifests, or from the first one of an API server
  failed     Service ports that could not be programmed and will be retried; missing
             if 0
With --logging-format=json the line is an entry of the log with these fields.

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

// errUsage is wrapped by errors of the command line. Their exit status is 2.
var errUsage = errors.New("see --help")

// bad returns an error that wraps errUsage.
func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), errUsage)
}

// parse returns the configuration of a command line that has n arguments besides flags.
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

// run runs the verb run.
func (p *program) run(ctx context.Context, args []string) error {
	flags := newFlags("run", runUsage, p.diag)
	if p.asKubeProxy {
		if err := flags.Set("adopt-from-kube-proxy", "true"); err != nil {
			return err
		}
	}
	cfg, err := parse(flags, args, 0)
	if err != nil {
		return err
	}
	if p.asKubeProxy && cfg.Adopt {
		cfg.Notes = append(cfg.Notes, "called as kube-proxy: --adopt-from-kube-proxy is on by default, and removes the rules that kube-proxy left")
	}
	log, err := p.logger(cfg)
	if err != nil {
		return err
	}
	if err = p.runWith(ctx, cfg, log); err != nil && cfg.JSON() {
		log.Error("nodeproxy run failed", "error", err)
		return loggedError{err}
	}
	return err
}

// loggedError is an error that is in the log already.
type loggedError struct{ error }

func (e loggedError) Unwrap() error { return e.error }

// runWith runs the verb run with a configuration.
func (p *program) runWith(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	m, err := findMode(p.modes, cfg.Mode)
	if err != nil {
		return bad("%w", err)
	}
	serves := cfg.WriteConfigTo == "" && !cfg.Cleanup && !cfg.InitOnly
	if serves && p.restrict != nil {
		// Log after it: it may execute the program again.
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
		modes, refused := cleanable(ctx, p.modes, cfg.Adopt, log)
		err := leftovers(ctx, modes, "", cfg.Adopt, log)
		if cfg.Adopt {
			// The rules of kube-proxy's modes refer to each other's chains and sets. The
			// first pass leaves out what is still in use.
			err = leftovers(ctx, modes, "", cfg.Adopt, log)
		}
		err = errors.Join(err, refused)
		if err := errors.Join(err, socketlb.Cleanup(ctx, socketlb.Config{})); err != nil {
			return err
		}
		log.Info("removed all rules")
		return nil
	case cfg.InitOnly && cfg.Mode == config.ModeUserspace:
		log.Info("mode userspace needs no kernel parameters")
		return nil
	case cfg.InitOnly:
		// Opening connection tracking loads its module, which has the parameters.
		if c, err := conntrack.New(conntrack.Config{}); err == nil {
			c.Close()
		}
		err := tune(cfg, log)
		if m.setSysctls != nil {
			err = errors.Join(err, m.setSysctls(ctx, settings{Config: cfg}))
		}
		err = errors.Join(err, resetSysctls(ctx, p.modes, cfg.Mode, log))
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
			return nil // stopped while newAgent waited for something
		}
		return err
	}
	a.logStart()
	switch err = a.run(ctx); {
	case err != nil:
	case cfg.Mode == config.ModeUserspace:
		log.Info("stopped; Services are not served until the next start")
	default:
		log.Info("stopped; the rules stay in effect")
	}
	return err
}

// logStart logs the configuration for the operator.
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
	if p, ok := a.kernel.get().plane.(*userspacePlane); ok {
		p.logRights(a.log)
	}
	if a.localhost != nil {
		a.log.Info("this process serves NodePorts at loopback addresses: connections to them end with it", "families", fmt.Sprint(c.LoopbackFamilies(a.families)))
	}
	if len(addresses) == 0 && c.PrimaryOnly {
		a.log.Warn("NodePorts are not served yet: the node's addresses are not known")
	}
	for _, f := range a.families {
		if len(c.DetectLocal.CIDRs) != 0 && !c.DetectLocal.Detects(f) {
			a.log.Warn("--cluster-cidr has no CIDR of a served address family: traffic of pods is not recognised in it", "family", f)
		}
	}
}

// version returns the program's version from the build information.
func version() string {
	if i, ok := debug.ReadBuildInfo(); ok && i.Main.Version != "" {
		return i.Main.Version
	}
	return "(devel)"
}

// setOOMScore sets this process's oom_score_adj (proc_pid_oom_score_adj(5)).
func setOOMScore(adj int32) error {
	const path = "/proc/self/oom_score_adj"
	value := strconv.Itoa(int(adj))
	if was, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(was)) == value {
		return nil // after dropPrivileges it could not be written again
	}
	return os.WriteFile(path, []byte(value), 0)
}

// errConfigChanged ends an agent whose configuration file changed since it started. Its
// supervisor restarts it.
var errConfigChanged = errors.New("configuration file changed: restart needed")

// watchConfig returns errConfigChanged when the configuration file has changed.
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
		// A missing or unreadable file does not count as a change.
		if now, err := os.ReadFile(path); err == nil && !bytes.Equal(was, now) {
			return errConfigChanged
		}
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
}
