// Package run is the verb run: an agent that is the whole process. It is built on package agent, which
// leaves all that concerns a process to it.
package run

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	_ "net/http/pprof"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // registers rest_client_*

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/examples/agent/sockets"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
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
	flags := agent.AddFlags(c.Flags())
	flags.AsKubeProxy, flags.Network = p.AsKubeProxy, os.Getenv("KUBE_NETWORK")
	p.CompleteFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error { return run(c, p, flags) }
	if p.AsKubeProxy {
		if err := c.Flags().Set("adopt-from-kube-proxy", "true"); err != nil {
			panic(err) // it is a flag of type bool
		}
	}
	return c
}

// run runs the verb run with parsed flags.
func run(c *cobra.Command, p *cli.Program, flags *agent.Flags) error {
	if n := c.Flags().NArg(); n != 0 {
		return cli.Bad("%d arguments instead of 0", n)
	}
	cfg, err := flags.Config(os.Hostname)
	if err != nil {
		return cli.Bad("%w", err)
	}
	effective := cfg.Effective()
	logFile := ""
	if f := c.Flag("log-file"); f != nil { // only Windows has it
		logFile = f.Value.String()
	}
	log, err := p.Logger(effective, cfg.Gates(), logFile)
	if err != nil {
		return err
	}
	json := effective.Logging.Format == logsapi.JSONLogFormat
	if err = runWith(c, p, cfg, json, log); err != nil && json {
		log.Error("nodeproxy run failed", "error", err)
		return errors.Join(err, cli.ErrLogged)
	}
	return err
}

func runWith(c *cobra.Command, p *cli.Program, cfg *agent.Config, json bool, log *slog.Logger) error {
	ctx, effective := c.Context(), cfg.Effective()
	is := func(flag string) bool { return c.Flag(flag).Value.String() == "true" }
	writeTo, cleanup, initOnly := c.Flag("write-config-to").Value.String(), is("cleanup"), is("init-only")
	if writeTo == "" && !cleanup && !initOnly && p.Restrict != nil {
		// Log after it: it may execute the program again.
		p.Restrict(log, Needed(is("socket-lb")), func(modules bool) {
			_ = setOOMScore(*effective.OOMScoreAdj)
			if modules {
				agent.LoadModules(ctx, cfg, log)
			}
		})
	}
	for _, note := range cfg.Notes() {
		log.Warn(note)
	}
	if p.AsKubeProxy && is("adopt-from-kube-proxy") {
		log.Warn("called as kube-proxy: --adopt-from-kube-proxy is on by default, and removes the rules that kube-proxy left")
	}
	switch {
	case writeTo != "":
		if err := cfg.Write(writeTo); err != nil {
			return err
		}
		log.Info("wrote the configuration", "file", writeTo)
		return nil
	case cleanup:
		if err := errors.Join(agent.Cleanup(ctx, cfg, p.NetNS, log), sockets.Cleanup(ctx)); err != nil {
			return err
		}
		log.Info("removed the rules")
		return nil
	case initOnly:
		switch needed, err := agent.SetParameters(ctx, cfg, p.NetNS, log); {
		case err != nil:
			return err
		case needed:
			log.Info("all kernel parameters are set", "mode", effective.Mode)
		default:
			log.Info("the mode needs no kernel parameters", "mode", effective.Mode)
		}
		return nil
	}
	if err := setOOMScore(*effective.OOMScoreAdj); err != nil {
		log.Warn("cannot set oom-score-adj", "value", *effective.OOMScoreAdj, "error", err)
	}
	cfg.Gates().AddMetrics()
	o := agent.Options{Config: cfg, NetNS: p.NetNS, Log: log, Version: cli.Version(), Gatherer: legacyregistry.DefaultGatherer, Serve: true, Tune: true, SocketLB: sockets.LB()}
	if !json {
		o.Lines = p.Out
	}
	if effective.EnableProfiling {
		o.Debug = debugPages()
	}
	a, err := agent.New(ctx, o)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped while New waited for something
		}
		return err
	}
	switch err = a.Run(ctx); {
	case err != nil:
	case effective.Mode == "userspace":
		log.Info("stopped; Services are not served until the next start")
	default:
		log.Info("stopped; the rules stay in effect")
	}
	return err
}

// debugPages serves profiles of the process, and lets requests set --v.
func debugPages() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/flags/v", setVerbosity)
	mux.Handle("/debug/pprof/", http.DefaultServeMux) // where net/http/pprof serves
	return mux
}

// setVerbosity sets --v for the whole process to the body of a PUT request, with the
// status codes of kube-proxy.
func setVerbosity(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodPut {
		w.WriteHeader(http.StatusNotAcceptable)
		fmt.Fprintln(w, "unsupported http method")
		return
	}
	level, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 16))
	var done string
	if err == nil {
		done, err = logs.GlogSetter(strings.TrimSpace(string(level)))
	}
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintln(w, err)
		return
	}
	fmt.Fprintln(w, done)
}
