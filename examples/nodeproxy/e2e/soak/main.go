//go:build linux

// Soak runs nodeproxy for a long time in the life of a cluster, and finds out whether a
// connection is lost or anything is left over.
//
//	soak -for 1h                          10,000 Services in mode nftables
//	soak -for 1h -mode iptables -iptables legacy -services 2000 -o report.json
//	soak -only 'rollout,SIGKILL' -seed 7  some kinds of events, as chosen before
//	soak -help                            all flags
//
// It builds a network of namespaces of its own (network.go): the node, clients, pods of the
// node, and one host that has all pods of 128 other nodes, so that each of the endpoints
// answers. It starts the real nodeproxy on the node, built or named by -nodeproxy. Objects
// come from a real API server, which -apiserver or PROXIER_KUBE_APISERVER names (build it
// in examples/nodeproxy/e2e/apiserver; etcd must be installed), or from a folder of
// manifests. It needs the right to make user namespaces, or root; nft; in mode iptables its
// programs.
//
// Mode ipvs takes a kernel with IPVS and root. Where there is none, a test runs the same in
// a virtual machine:
//
//	go test -run TestSoakIPVS -v -timeout 1h . -for 30m -services 300
//
// # What happens
//
// One event follows another, chosen by chance from events.go: rollouts, scaling up and
// down and to zero, reboots of other nodes and of this one, Services that come, go and
// change, slices that are rearranged, API servers that are killed and started again (or
// the folder gone for a while), agents that are killed at work, or changed for another, or
// away while much changes; and other programs that add rules of their own, or flush all,
// with nft, iptables, ipset and ipvsadm. After each event it waits until everything is in
// effect, which it sees by packets alone, and judges some connections: from anywhere, to
// anything, also to closed ports and addresses that no Service has.
//
// All the time connections are opened, half of them to Services that were changed lately;
// some stay open, and a line goes through each every second; and UDP sockets stay open,
// which must be moved from endpoints that go.
//
// # What is lost
//
// [ruleset.Snapshot.Trace] judges each connection, by objects that its tracker gets before
// the agent does: which endpoints may answer, by what address they see the client, what is
// refused and what gets no answer. While a change is not known to be in effect, anything
// between the ruleset before and the latest one will do. A TCP connection is lost also if
// it came about only after a packet had to be sent again. One that stays open is lost if it
// breaks, unless its endpoint goes: then it ends before, as those of a pod do.
//
// There are two reasons for a loss, both counted in the report. The rules were gone, as
// others had flushed them: from then until the agent has repaired them, for which it has as
// long as -repair says. And the machine stood still, as measured by a goroutine that only
// polls the clock (package internal/stall): that excuses packets sent again, and UDP
// requests without an answer, and nothing else.
//
// # What is left over
//
// In the end all Services are made what they were in the beginning. The agent's memory,
// goroutines, files and sockets, and the numbers of the kernel's objects, must be what they
// were after its cold start with the same Services. Then all are removed, and the kernel
// must have, line by line, what it had when the agent had started without any. After
// "nodeproxy run --cleanup" it must have what it had before, and the agent's folder for
// temporary files must be empty. In the last part of a run no agent is killed, so that the
// last one has lived through much of it when it is measured.
//
// The heap, after a collection, may be a quarter and 8 MB more than it was, and without
// Services another twentieth of what it was with all of them: Go's maps do not shrink, and
// buffers are kept for the next change. Some goroutines and a file or
// socket more are let pass, as clients of the agent's servers come and go (leftovers.go).
// Chains that many Services share, which mode nftables keeps by design, do not count.
//
// # What it prints
//
// A line every ten seconds, and in the end a table; the report as JSON with -o. Each event
// and each failure is in the log with its time (-log), a failure with the event that went on
// or was the last. The exit status is 1 if anything was lost without a reason or is left
// over. With the same -seed, the same is chosen: the objects, the events and their order.
// When things happen beside each other it is still the machine that decides.
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

// newFlags returns the flags and what they set.
func newFlags(f *flag.FlagSet) *options {
	o := &options{events: allEvents, settle: 30 * time.Second}
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
	f.StringVar(&o.apiserver, "apiserver", os.Getenv(controlplane.Env), "the program kube-apiserver, for which etcd must be installed; a folder of manifests serves if empty")
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

// keepLogs copies the logs of the processes, and the heap profile, to where the run's log is.
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
