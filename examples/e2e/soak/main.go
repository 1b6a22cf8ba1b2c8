//go:build linux

// Soak runs nodeproxy for a long time under constant change, and reports lost connections
// and leftovers.
//
//	soak -for 1h                          10,000 Services in mode nftables
//	soak -for 1h -mode iptables -services 2000
//	soak -only 'rollout,agent restart' -seed 7   these events alone, chosen with this seed
//	soak -help                            all flags
//
// Soak builds its own network of namespaces (network.go). The real nodeproxy runs on the node and reads
// a folder of manifests. Soak needs root, or the right to create user namespaces, and nft, iptables and
// ip6tables. To run mode iptables with another flavor than the machine's, put links of these names
// first in PATH. Mode ipvs needs root and a kernel with IPVS; elsewhere a test runs it in a virtual
// machine:
//
//	go test -run TestSoakIPVS -v -timeout 1h . -for 30m -services 300
//
// Random events follow each other: those of a cluster, of the agent's process and of other programs
// (events.go). After each event soak waits until packets show that everything is in effect. Then it
// judges some connections from random places to random targets, among them closed ports and
// addresses that no Service has. During the whole run it opens connections, half of them to recently
// changed Services. Some connections stay open and carry a line each second. Some UDP sockets stay
// open, and the agent must move them away from endpoints that are removed.
//
// # Losses
//
// [ruleset.Snapshot.Trace] judges each connection: which endpoints may answer, which client
// address they see, what is refused and what gets no answer. Its tracker receives each
// object before the agent does. Until a change is known to be in effect, the verdict of any
// ruleset between the previous and the latest one is accepted. A TCP connection also counts
// as lost if it was established only after a retransmission, and one that stays open if it breaks.
// Soak closes it itself before its endpoint is removed, as a pod does when it ends.
//
// The report excuses a loss for two reasons and counts each. An event had removed the rules, and the
// agent had not yet repaired them, within the time that -repair allows. Or the machine stalled, as
// package internal/testing/stall measures it: this excuses retransmissions and unanswered UDP
// requests alone, and too many of them are a failure.
//
// # Leftovers
//
// At the end soak deletes all Services. Then the kernel's lists must not name any of them, their
// addresses or endpoints, connection tracking must hold no translated UDP flow, and the agent may
// use only little more memory, goroutines and files than before it had Services (leftovers.go). No
// event restarts the agent in the last part of a run, so it has lived through much of it. After
// "nodeproxy run --cleanup" the kernel must not name any object of the agent, and the agent's folder
// for temporary files must be empty.
//
// The exit status is 1 if anything was lost without an excuse or left over. The log (-log) holds each
// event and each failure with its time. The same -seed chooses the same objects and events in the same
// order; the timing still varies.
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
	"time"

	"github.com/go-proxier/proxier/examples/e2e/internal/nodeagent"
)

func main() {
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	o := newFlags(f)
	os.Exit(nodeagent.Main(f, os.Args[1:], os.Stderr, func(ctx context.Context) (bool, error) { return o.run(ctx, os.Stdout) }))
}

// newFlags defines the flags and returns the options that they set.
func newFlags(f *flag.FlagSet) *options {
	o := &options{events: allEvents, pause: 500 * time.Millisecond, drain: 30 * time.Second}
	f.DurationVar(&o.length, "for", 10*time.Minute, "duration of the events")
	f.IntVar(&o.services, "services", maxServices, "number of Services")
	f.StringVar(&o.mode, "mode", "nftables", "the agent's mode: nftables, iptables or ipvs")
	f.Uint64Var(&o.seed, "seed", uint64(time.Now().Unix()), "seed of all random choices")
	f.IntVar(&o.rate, "rate", 200, "connections opened per second")
	f.DurationVar(&o.repair, "repair", 90*time.Second, "longest time until a change is in effect or rules are repaired")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "path of nodeproxy; built from source if empty")
	f.StringVar(&o.logFile, "log", "soak.log", "file for the log")
	f.StringVar(&o.only, "only", "", "names of the events to run, separated by commas; all if empty")
	return o
}

// maxServices is the largest number of Services. Each has a slot, and with it its own node ports.
const maxServices = 10000

// check returns an error for invalid options.
func (o *options) check() error {
	switch {
	case letter(o.mode) == "":
		return fmt.Errorf("unknown mode %q", o.mode)
	case o.services < 1 || o.services > maxServices:
		return fmt.Errorf("-services must be from 1 to %d", maxServices)
	case o.rate < 1 || o.length < 0:
		return errors.New("-rate must be positive, and -for not negative")
	}
	return nil
}

// run runs a soak with its files and prints the result, which ok is.
func (o *options) run(ctx context.Context, out io.Writer) (ok bool, err error) {
	if err := o.check(); err != nil {
		return false, err
	}
	dir, err := os.MkdirTemp("", "soak-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	if o.nodeproxy == "" {
		fmt.Fprintln(out, "Building nodeproxy.")
	}
	log, err := os.Create(o.logFile)
	if err != nil {
		return false, err
	}
	defer log.Close()
	fmt.Fprintf(out, "seed %d, log %s, and the agent's log beside it\n", o.seed, o.logFile)
	r, err := run(ctx, o, dir, log, out)
	if r == nil {
		return false, err
	}
	r.table(io.MultiWriter(out, log))
	return r.ok(), err
}
