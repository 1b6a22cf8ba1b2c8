//go:build linux

// Chaos runs nodeproxy with an API server that misbehaves, objects that no API server should hold,
// and damage to the process and the kernel's state, while connections run through the node. It
// judges every connection by [ruleset.Snapshot.Trace], and after each round of changes and faults
// it compares the kernel's rules with the objects.
//
//	chaos -for 1h                     all modes that this machine supports
//	chaos -mode nftables -seed 17 -worlds 1   repeats a world
//	chaos -only 'SIGKILL,flush nat'   these faults alone
//	chaos -help                       all flags
//
// The modes are nftables, iptables (the machine's flavor), iptables-legacy, ipvs, sockets (nftables
// with --socket-lb) and offload (nftables with --nftables-offload). Modes run concurrently. Mode ipvs
// needs a kernel with IPVS; TestChaosInVM runs it in a virtual machine elsewhere.
//
// Chaos needs root, or the right to create user namespaces; mode sockets needs root.
//
// # Worlds
//
// A mode's time consists of worlds, one after another. A world has a seed, a node in a network
// namespace with hosts around it (network.go), an API server (server.go), one agent, traffic, and some rounds.
// Package worldgen generates the objects, which are changed to invalid and unusual ones at times
// (objects.go). A round makes up to 25 steps. A step is a few changes of objects, or a fault (faults.go).
// Half of the rounds have no fault that removes rules,
// and in a third of the worlds (those whose seed 3 divides) no fault ends the agent. In
// worlds with an even seed the first round begins when the agent has started, and there is a pause
// after each step, so that a repetition has the same result, unless that depends on the order of
// concurrent work.
//
// # Traffic
//
// Connections and UDP requests go from random places to random frontends, half of them to recently
// changed Services, some to closed ports and to addresses that no Service has. Some TCP connections
// stay open and carry a line each second; chaos closes them itself before their endpoint is removed, as
// a pod does when it ends. Some UDP sockets stay open, and the agent must move them away from
// endpoints that are removed. The oracle (oracle.go) says which endpoints may answer, which client
// address they see, what is refused and what gets no answer. A TCP
// connection also counts as lost if it was established only after a retransmission, and one that
// stays open if it breaks.
//
// A loss is excused, and counted, for two reasons. A fault had removed rules, and the round is not
// over. Or the machine stalled, as package internal/testing/stall measures it: this excuses
// retransmissions and unanswered UDP requests alone, and too many of them are a failure.
//
// # Judgement
//
// At the end of a round the API server behaves again. Within -settle,
//
//   - "nodeproxy render --diff kernel" must find no difference between the objects and the kernel's rules;
//   - the agent must be healthy, and must not have ended by itself, panicked, or reported a data race;
//   - connection tracking must hold no UDP flow to an endpoint that its Service does not have;
//   - a connection to each frontend, from a random place, must have the outcome that the oracle says.
//
// Then everything is in effect, and further connections must have exactly the outcome that the
// oracle says, those of a client to a Service with affinity the same endpoint.
//
// At the end of a world all Services are deleted. The kernel's lists must then not name any of them,
// their addresses or endpoints (leftovers.go), and the agent may use only little more memory, goroutines and files
// than after a restart. After SIGTERM and "nodeproxy run --cleanup" the kernel
// must not name any object of the agent, and the agent's folder for temporary files must be empty.
//
// In mode ipvs only connections that must be forwarded are judged.
//
// Chaos prints a line for each world, and the failures. The folder -dir keeps the log, the objects and the
// steps of worlds that failed. The exit status is 1 after a failure.
//
// [ruleset.Snapshot.Trace]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Snapshot.Trace
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func main() { os.Exit(command(os.Args[1:], os.Stdout, os.Stderr)) }

type options struct {
	length    time.Duration
	modes     string
	seed      uint64
	worlds    int
	rounds    int
	services  int
	rate      int
	settle    time.Duration
	only      string
	nodeproxy string
	dir       string
	// loseEvents makes the API server withhold some changes from watches, so that tests can
	// check that chaos finds an agent that misses a change.
	loseEvents bool
}

func newFlags(f *flag.FlagSet) *options {
	o := &options{}
	f.DurationVar(&o.length, "for", time.Minute, "duration; a world that has begun is completed")
	f.StringVar(&o.modes, "mode", "all", "modes, separated by commas: "+strings.Join(modeNames(), ", ")+"; or all that this machine supports")
	f.Uint64Var(&o.seed, "seed", uint64(time.Now().Unix()), "seed of the first world; each world adds 1")
	f.IntVar(&o.worlds, "worlds", 0, "number of worlds of each mode; 0 means as many as -for allows")
	f.IntVar(&o.rounds, "rounds", 6, "number of rounds of a world")
	f.IntVar(&o.services, "services", 30, "number of Services")
	f.IntVar(&o.rate, "rate", 50, "connections opened per second, in each mode")
	f.DurationVar(&o.settle, "settle", time.Minute, "longest time until the state must be right after a round")
	f.StringVar(&o.only, "only", "", "names of the faults to run, separated by commas; all if empty")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "path of nodeproxy; built from source if empty")
	f.StringVar(&o.dir, "dir", "chaos-failures", "folder for the logs of worlds that failed")
	return o
}

// maxServices is the largest number of Services, each of which has NodePorts of its own.
const maxServices = 1000

// command runs the command and returns the exit status.
func command(args []string, out, diag io.Writer) int {
	f := flag.NewFlagSet("chaos", flag.ExitOnError)
	o := newFlags(f)
	f.SetOutput(diag)
	f.Parse(args)
	// In a user namespace iptables-nft may not enlarge its socket's buffer, so root stays outside.
	if os.Geteuid() != 0 {
		if inside, code, err := netlab.Reexec(); err != nil || !inside {
			if err != nil {
				fmt.Fprintf(diag, "chaos: %v\n", err)
				code = 1
			}
			return code
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	failures, err := o.run(ctx, out)
	if err != nil {
		fmt.Fprintf(diag, "chaos: %v\n", err)
	}
	if failures != 0 {
		fmt.Fprintf(out, "%d failures\n", failures)
	}
	if err != nil || failures != 0 {
		return 1
	}
	return 0
}

// run runs all modes concurrently and returns the number of failures. In a virtual machine, where a
// fault of one world would affect all, it runs one after the other and divides the time.
func (o *options) run(ctx context.Context, out io.Writer) (failures int, err error) {
	if o.services < 1 || o.services > maxServices || o.rate < 1 {
		return 0, fmt.Errorf("-services must be from 1 to %d, and -rate positive", maxServices)
	}
	modes, err := o.chosenModes(out)
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "chaos-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	if o.nodeproxy, err = process.Nodeproxy(ctx, o.nodeproxy, dir); err != nil {
		return 0, err
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	report := log.New(out, "", 0)
	length := o.length
	if inMachine() {
		length /= time.Duration(len(modes))
	}
	for _, m := range modes {
		wg.Go(func() {
			n, err := o.runMode(ctx, m, length, report)
			mu.Lock()
			defer mu.Unlock()
			failures += n
			if err != nil && ctx.Err() == nil {
				errs = append(errs, fmt.Errorf("mode %s: %w", m.name, err))
			}
		})
		if inMachine() {
			wg.Wait()
		}
	}
	wg.Wait()
	return failures, errors.Join(errs...)
}

// chosenModes returns the modes to run. Of "all", it leaves out those that this machine does
// not support, and prints them.
func (o *options) chosenModes(out io.Writer) (chosen []*mode, err error) {
	names := strings.Split(o.modes, ",")
	if o.modes == "all" {
		names = modeNames()
	}
	for _, name := range names {
		i := slices.IndexFunc(modes, func(m *mode) bool { return m.name == name })
		if i < 0 {
			return nil, fmt.Errorf("unknown mode %q", name)
		}
		switch err := modes[i].supported(); {
		case err == nil:
			chosen = append(chosen, modes[i])
		case o.modes == "all":
			fmt.Fprintf(out, "%-15s left out: %v\n", name, err)
		default:
			return nil, fmt.Errorf("mode %s: %w", name, err)
		}
	}
	return chosen, nil
}

// runMode runs worlds in one mode, for a time unless their number is given.
func (o *options) runMode(ctx context.Context, m *mode, length time.Duration, out *log.Logger) (failures int, err error) {
	start := time.Now()
	for world := 0; err == nil && ctx.Err() == nil && (world < o.worlds || o.worlds == 0 && (world == 0 || time.Since(start) < length)); world++ {
		var n int
		seed := o.seed + uint64(world)
		if n, err = o.runWorld(ctx, m, seed, out); err != nil {
			err = fmt.Errorf("seed %d: %w", seed, err)
		}
		failures += n
	}
	return failures, err
}
