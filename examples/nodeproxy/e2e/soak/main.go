//go:build linux

// Soak runs nodeproxy for a long time under constant change, and reports lost connections
// and leftovers.
//
//	soak -for 1h                          10,000 Services in mode nftables
//	soak -for 1h -mode iptables -iptables legacy -services 2000 -o report.json
//	soak -only 'rollout,SIGKILL' -seed 7  these kinds of events alone, chosen with this seed
//	soak -help                            all flags
//
// Soak builds its own network of namespaces (network.go): the node, clients, pods of the
// node, and one host that holds all pods of 128 other nodes. Every endpoint answers. The
// real nodeproxy, built or named by -nodeproxy, runs on the node. It reads its objects from
// a real API server, which -apiserver or PROXIER_KUBE_APISERVER names, or from a folder of
// manifests. The API server needs etcd: the one that PROXIER_ETCD names, or else the one in
// PATH. examples/nodeproxy/e2e/apiserver builds both.
// Soak needs the right to create user namespaces, or root. It needs nft, and in mode
// iptables the iptables programs.
//
// Mode ipvs needs root and a kernel with IPVS. On other kernels a test runs the same soak in
// a virtual machine:
//
//	go test -run TestSoakIPVS -v -timeout 1h . -for 30m -services 300
//
// # Events
//
// Soak runs random events from events.go, one after another: rollouts; scaling up, down and
// to zero; reboots of other nodes and of this one; Services that are created, deleted and
// changed; slices that are rearranged; an API server that is killed and started again, or a
// folder that disappears for a while; agents that are killed at work, replaced, or absent
// during many changes; and other programs that add their own rules or flush all rules with
// nft, iptables, ipset and ipvsadm. After each event soak waits until packets show that
// everything is in effect. Then it judges some connections from random places to random
// targets, among them closed ports and addresses that no Service has.
//
// During the whole run soak opens connections, half of them to recently changed Services.
// Some connections stay open and carry a line each second. Some UDP sockets stay open, and
// the agent must move them away from endpoints that are removed.
//
// # What counts as lost
//
// [ruleset.Snapshot.Trace] judges each connection: which endpoints may answer, which client
// address they see, what is refused and what gets no answer. Its tracker receives each
// object before the agent does. Until a change is known to be in effect, the verdict of any
// ruleset between the previous and the latest one is accepted. A TCP connection also counts
// as lost if it was established only after a retransmission. A connection that stays open
// counts as lost if it breaks. Soak closes it itself before its endpoint is removed, as a
// pod does when it ends.
//
// The report excuses a loss for two reasons and counts each. The rules were missing because
// another program had flushed them: this holds from the flush until the agent has repaired
// the rules, within the time that -repair allows. Or the machine stalled, as package
// internal/stall measures it: this excuses retransmissions and unanswered UDP requests
// alone.
//
// # What counts as left over
//
// At the end soak restores the Services of the beginning. The agent's memory, goroutines,
// files and sockets, and the numbers of the kernel's objects, must be what they were after
// its cold start with the same Services. Then soak deletes all Services, and the kernel must
// hold, line by line, what it held after the agent had started without Services. After
// "nodeproxy run --cleanup" the kernel must hold what it held before the first start, and
// the agent's folder for temporary files must be empty. Soak kills no agent in the last
// part of a run, so the measured agent has lived through much of it.
//
// The heap, after a collection, may exceed its earlier size by a quarter and 8 MB, and
// without Services by another twentieth of its size with all of them: Go's maps do not
// shrink, and buffers are kept for the next change. A few more goroutines, files and sockets
// are accepted, because clients of the agent's servers come and go (leftovers.go). Chains
// that many Services share do not count: mode nftables keeps them by design.
//
// # Output
//
// Soak prints a line every ten seconds and a table at the end, and writes the report as JSON
// with -o. The log (-log) holds each event and each failure with its time; a failure names
// the current or last event. The exit status is 1 if anything was lost without an excuse or
// left over. The same -seed chooses the same objects and the same events in the same order;
// the timing of concurrent actions still varies.
//
// [ruleset.Snapshot.Trace]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Snapshot.Trace
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

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/controlplane"
	"github.com/go-proxier/proxier/internal/netlab"
)

func main() {
	os.Exit(soakCommand(os.Args[1:], os.Stdout, os.Stderr))
}

// newFlags defines the flags and returns the options that they set.
func newFlags(f *flag.FlagSet) *options {
	o := &options{events: allEvents, drain: 30 * time.Second}
	f.DurationVar(&o.length, "for", 10*time.Minute, "duration of the events")
	f.IntVar(&o.services, "services", 10000, "number of Services")
	f.IntVar(&o.endpoints, "endpoints", 10, "average number of endpoints per Service")
	f.StringVar(&o.mode, "mode", "nftables", "the agent's mode: nftables, iptables or ipvs")
	f.StringVar(&o.iptables, "iptables", "", "the flavour of iptables that the agent uses: nft or legacy; the system's if empty")
	f.Uint64Var(&o.seed, "seed", uint64(time.Now().Unix()), "seed of all random choices")
	f.IntVar(&o.rate, "rate", 200, "connections opened per second")
	f.IntVar(&o.workers, "workers", 16, "connections opened at a time")
	f.IntVar(&o.held, "held", 60, "number of connections that stay open")
	f.IntVar(&o.talks, "talks", 20, "number of UDP sockets that stay open")
	f.DurationVar(&o.pause, "pause", 500*time.Millisecond, "average pause between two events")
	f.DurationVar(&o.repair, "repair", 90*time.Second, "longest time until a change is in effect or rules are repaired")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "path of nodeproxy; built from source if empty")
	f.StringVar(&o.apiserver, "apiserver", os.Getenv(controlplane.APIServerEnv), "path of kube-apiserver, which needs etcd; if empty, the agent reads a folder of manifests")
	f.StringVar(&o.logFile, "log", "soak.log", "file for the log")
	f.StringVar(&o.out, "o", "", "file for the report as JSON")
	f.StringVar(&o.only, "only", "", "names of the events to run, separated by commas; all if empty")
	return o
}

// check returns an error for invalid options.
func (o *options) check() error {
	switch {
	case letter(o.mode) == "":
		return fmt.Errorf("unknown mode %q", o.mode)
	case !slices.Contains([]string{"", "nft", "legacy"}, o.iptables):
		return fmt.Errorf("unknown flavour %q of iptables", o.iptables)
	case o.services < 1 || o.services > 15000:
		return errors.New("-services must be from 1 to 15000")
	case o.endpoints < 1 || o.endpoints > 100:
		return errors.New("-endpoints must be from 1 to 100")
	case o.rate < 1 || o.workers < 1 || o.held < 0 || o.talks < 0 || o.length < 0 || o.pause < 0:
		return errors.New("-rate and -workers must be positive, and -held, -talks, -for and -pause not negative")
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
	// As root, the agent must run as on a node. In a user namespace the programs of iptables-nft
	// may not enlarge their socket's buffer, and refuse transactions of a few hundred kilobytes.
	var err error
	if os.Geteuid() != 0 {
		inside, code, e := netlab.Reexec()
		if e == nil && !inside {
			return code
		}
		err = e
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

// run runs a soak with its files and prints the report. ok is the report's result.
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

// keepLogs copies the logs of the processes and the heap profile to the folder of the
// run's log.
func keepLogs(dir, beside string) error {
	var errs []error
	for _, name := range []string{"agent.log", "apiserver.log", heapProfile} {
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
