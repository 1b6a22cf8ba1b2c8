//go:build linux

// Chaos runs nodeproxy with an API server that misbehaves, objects that no API server should hold,
// and damage to the process and the kernel's state, while connections run through the node. It
// judges every connection by [ruleset.Snapshot.Trace], and after each round of changes and faults
// it compares the kernel's rules with the objects.
//
//	chaos -for 1h                     all modes that this machine supports
//	chaos -mode nftables -seed 17 -worlds 1   repeats a world
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
// Half of the rounds have no fault that removes rules, and in a third of the worlds (those whose seed 3 divides) no
// fault ends the agent. In worlds with an even seed the first round begins when the agent has started, and there is a
// pause after each step, so that a repetition has the same result, unless that depends on the order of concurrent work.
//
// # Traffic
//
// Connections and UDP requests go from random places to random frontends, half of them to recently
// changed Services, some to closed ports and to addresses that no Service has. Some TCP connections
// stay open and carry a line each second; chaos closes them itself before their endpoint is removed, as
// a pod does when it ends. Some UDP sockets stay open, and the agent must move them away from
// endpoints that are removed. The oracle (oracle.go) says which endpoints may answer, which client
// address they see, what is refused and what gets no answer. A TCP connection also counts as lost if it was established
// only after a retransmission, and one that stays open if it breaks.
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
// than after a restart. After SIGTERM and "nodeproxy run --cleanup" the kernel must not name any object of the agent,
// and the agent's folder for temporary files must be empty.
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
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-proxier/proxier/examples/internal/process"
)

type options struct {
	length    time.Duration
	modes     string
	seed      uint64
	worlds    int
	rounds    int
	services  int
	rate      int
	settle    time.Duration
	nodeproxy string
	dir       string
}

func newFlags(f *flag.FlagSet) *options {
	o := &options{}
	f.DurationVar(&o.length, "for", time.Minute, "duration; a world that has begun is completed")
	f.StringVar(&o.modes, "mode", "all", "modes, separated by commas: "+strings.Join(modeNames(), ", ")+"; or all that this machine supports")
	f.Uint64Var(&o.seed, "seed", uint64(time.Now().Unix()), "seed of the first world; each world adds 1")
	f.IntVar(&o.worlds, "worlds", 0, "number of worlds of each mode; 0 means as many as -for allows")
	f.IntVar(&o.rounds, "rounds", 6, "number of rounds of a world")
	f.IntVar(&o.services, "services", 30, "number of Services, from 1 to 1000")
	f.IntVar(&o.rate, "rate", 50, "connections opened per second, in each mode")
	f.DurationVar(&o.settle, "settle", time.Minute, "longest time until the state must be right after a round")
	f.StringVar(&o.nodeproxy, "nodeproxy", "", "path of nodeproxy; built from source if empty")
	f.StringVar(&o.dir, "dir", "chaos-failures", "folder for the logs of worlds that failed")
	return o
}

func main() {
	o := newFlags(flag.CommandLine)
	flag.Parse()
	// In a user namespace iptables-nft may not enlarge its socket's buffer, so root stays outside.
	process.Main("chaos", func(ctx context.Context) error {
		failures, err := o.run(ctx, os.Stdout)
		if failures != 0 {
			err = errors.Join(err, fmt.Errorf("%d failures", failures))
		}
		return err
	})
}

// run runs all modes concurrently and returns the number of failures. In a virtual machine, where a
// fault of one world would affect all, it runs one after the other and divides the time.
func (o *options) run(ctx context.Context, out io.Writer) (failures int, err error) {
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
	var g errgroup.Group
	var count atomic.Int64
	report, length := log.New(out, "", 0), o.length
	if inMachine() {
		g.SetLimit(1)
		length /= time.Duration(len(modes))
	}
	for _, m := range modes {
		g.Go(func() error {
			start := time.Now()
			for i := 0; ctx.Err() == nil && (i < o.worlds || o.worlds == 0 && (i == 0 || time.Since(start) < length)); i++ {
				seed := o.seed + uint64(i)
				n, err := o.runWorld(ctx, m, seed, report)
				count.Add(int64(n))
				if err != nil && ctx.Err() == nil {
					return fmt.Errorf("mode %s, seed %d: %w", m.name, seed, err)
				}
			}
			return nil
		})
	}
	err = g.Wait()
	return int(count.Load()), err
}

// chosenModes returns the modes to run. Of "all", it leaves out those that this machine does
// not support, and prints them.
func (o *options) chosenModes(out io.Writer) (chosen []*mode, err error) {
	names := strings.Split(o.modes, ",")
	for _, m := range modes {
		if !slices.Contains(names, m.name) && o.modes != "all" {
			continue
		}
		switch err := m.supported(); {
		case err == nil:
			chosen = append(chosen, m)
		case o.modes == "all":
			fmt.Fprintf(out, "%-15s left out: %v\n", m.name, err)
		default:
			return nil, fmt.Errorf("mode %s: %w", m.name, err)
		}
	}
	if o.modes != "all" && len(chosen) != len(names) {
		return nil, fmt.Errorf("-mode %s: the modes are %s", o.modes, strings.Join(modeNames(), ", "))
	}
	return chosen, nil
}
