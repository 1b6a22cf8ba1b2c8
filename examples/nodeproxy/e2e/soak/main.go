//go:build linux

// Soak.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
)

func main() {
	os.Exit(soakCommand(os.Args[1:], os.Stdout, os.Stderr))
}

// newFlags returns the flags and what they set.
func newFlags(f *flag.FlagSet) *options {
	o := &options{events: allEvents, settle: 20 * time.Second}
	f.DurationVar(&o.length, "for", 10*time.Minute, "for how long there are events")
	f.IntVar(&o.services, "services", 10000, "how many Services there are")
	f.IntVar(&o.endpoints, "endpoints", 10, "how many endpoints a Service has on average")
	f.StringVar(&o.mode, "mode", "nftables", "the agent's mode: nftables, iptables or ipvs")
	f.StringVar(&o.iptables, "iptables", "", "the flavour of iptables that the agent uses: nft or legacy; the system's if empty")
	f.Uint64Var(&o.seed, "seed", uint64(time.Now().Unix()), "what all choices follow from")
	f.IntVar(&o.rate, "rate", 200, "how many connections are opened in a second")
	f.IntVar(&o.workers, "workers", 16, "how many connections are opened at a time")
	f.IntVar(&o.held, "held", 60, "how many connections stay open")
	f.IntVar(&o.talks, "talks", 20, "how many UDP sockets stay open")
	f.DurationVar(&o.pause, "pause", 500*time.Millisecond, "how long it is quiet between two events, on average")
	f.DurationVar(&o.repair, "repair", 90*time.Second, "how long it may take until a change is in effect, or rules are repaired")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "the agent's program; built if empty")
	f.StringVar(&o.apiserver, "apiserver", os.Getenv("PROXIER_KUBE_APISERVER"), "the program kube-apiserver, for which etcd must be installed; a folder of manifests serves if empty")
	f.StringVar(&o.logFile, "log", "soak.log", "the file for the log")
	f.StringVar(&o.out, "o", "", "a file for the report as JSON")
	f.StringVar(&o.only, "only", "", "the names of the events that happen, with commas between them; all if empty")
	return o
}

// check returns what is wrong with the options.
func (o *options) check() error {
	switch {
	case letter(o.mode) == "":
		return fmt.Errorf("there is no mode %q", o.mode)
	case !slices.Contains([]string{"", "nft", "legacy"}, o.iptables):
		return fmt.Errorf("there is no flavour %q of iptables", o.iptables)
	case o.services < 1 || o.services > 15000:
		return errors.New("-services must be from 1 to 15000")
	case o.endpoints < 1 || o.endpoints > 100:
		return errors.New("-endpoints must be from 1 to 100")
	case o.rate < 1 || o.workers < 1 || o.held < 0 || o.talks < 0 || o.length < 0 || o.pause < 0:
		return errors.New("a number is too small")
	}
	return nil
}

// soakCommand runs the command and returns the exit status.
func soakCommand(args []string, out, diag io.Writer) int {
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	f.SetOutput(diag)
	o := newFlags(f)
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if err := o.check(); err != nil || f.NArg() != 0 {
		fmt.Fprintf(diag, "soak: %v %q\n", err, f.Args())
		return 2
	}
	inside, code, err := netlab.Reexec()
	if err == nil && !inside {
		return code
	}
	ok := false
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		ok, err = o.run(ctx, out)
	}
	if err != nil {
		fmt.Fprintln(diag, "soak:", err)
	}
	if err != nil || !ok {
		return 1
	}
	return 0
}

// run runs a soak with its files, prints the report, and returns whether all was well.
func (o *options) run(ctx context.Context, out io.Writer) (ok bool, err error) {
	dir, err := os.MkdirTemp("", "soak-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	if o.nodeproxy == "" {
		fmt.Fprintln(out, "Building nodeproxy.")
		o.nodeproxy = filepath.Join(dir, "nodeproxy")
		if err := buildAgent(ctx, o.nodeproxy, os.Environ()); err != nil {
			return false, fmt.Errorf("%w (see -nodeproxy)", err)
		}
	}
	if o.nodeproxy, err = filepath.Abs(o.nodeproxy); err != nil {
		return false, err
	}
	log, err := os.Create(o.logFile)
	if err != nil {
		return false, err
	}
	defer log.Close()
	fmt.Fprintf(out, "seed %d, log %s\n", o.seed, o.logFile)
	fmt.Fprintf(log, "%+v\n", *o)
	r, err := run(ctx, o, dir, log, out)
	if r == nil {
		return false, err
	}
	r.table(io.MultiWriter(out, log))
	if err != nil || !r.ok() {
		err = errors.Join(err, keepLogs(dir, o.logFile))
		fmt.Fprintf(out, "See %s, and the agent's log beside it.\n", o.logFile)
	}
	if o.out != "" {
		err = errors.Join(err, r.writeJSON(o.out))
	}
	return r.ok(), err
}

// buildAgent builds nodeproxy.
func buildAgent(ctx context.Context, file string, env []string) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", file, "github.com/go-proxier/proxier/examples/nodeproxy")
	build.Env = env
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build nodeproxy: %w: %s", err, text)
	}
	return nil
}

// keepLogs copies the logs of the processes to where the run's log is.
func keepLogs(dir, beside string) error {
	var errs []error
	for _, name := range []string{"agent.log", "apiserver.log"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(beside+"."+name, text, 0o644)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
