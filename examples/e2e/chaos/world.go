//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/testing/stall"
)

// world is one node with an agent, an API server and traffic.
type world struct {
	o       *options
	mode    *mode
	seed    uint64
	rng     *rand.Rand
	dir     string
	node    *node
	env     environment
	server  *apiServer
	objects *objects
	agent   *agent
	oracle  *oracle
	traffic *traffic
	stalls  *stall.Detector
	faults  []fault
	// restored is set if another program has restored an old state. If it did so between the
	// agent's reading and writing, chains that no rule leads to stay until the next full sync. Flows that
	// its rules began stay until they expire.
	restored bool

	rec *recorder
	// rounds and steps count what was made, and slowest is the longest time until a state was right.
	rounds, steps int
	slowest       time.Duration
}

// maxSteps is the greatest number of steps of a round.
const maxSteps = 25

// runWorld runs one world, prints the result and returns the number of failures. The error is about the
// test itself.
func (o *options) runWorld(ctx context.Context, m *mode, seed uint64, out *log.Logger) (failures int, err error) {
	w, err := o.newWorld(m, seed)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	defer w.close()
	if err := w.open(ctx); err != nil {
		return 0, err
	}
	for w.rounds < o.rounds && ctx.Err() == nil && !w.rec.failed() && err == nil {
		err = w.round(ctx) // after a failure, later rounds would repeat the difference
	}
	if err == nil && ctx.Err() == nil && !w.rec.failed() {
		err = w.end(ctx)
	}
	w.traffic.end()
	w.rec.limitStalls()
	list := w.rec.failures
	out.Printf("%-15s seed %d: %d rounds, %d steps in %v, state right after %v at most; %s; %d failures%s",
		m.name, seed, w.rounds, w.steps, time.Since(start).Round(100*time.Millisecond), w.slowest.Round(10*time.Millisecond), w.rec.traffic(),
		len(list), lines(list[:min(len(list), maxPrinted)]))
	if err != nil || len(list) != 0 {
		err = errors.Join(err, w.keep())
	}
	return len(list), err
}

func lines(list []string) (text string) {
	for _, line := range list {
		text += "\n" + line
	}
	return text
}

func (o *options) newWorld(m *mode, seed uint64) (*world, error) {
	h := fnv.New64a()
	h.Write([]byte(m.name))
	w := &world{o: o, mode: m, seed: seed, rng: rand.New(rand.NewPCG(seed, h.Sum64())), faults: slices.Concat(commonFaults, m.faults), rec: &recorder{made: map[string]int{}}}
	if inMachine() {
		w.faults = append(w.faults, machineFaults...)
	}
	if o.only != "" {
		names := strings.Split(o.only, ",")
		w.faults = slices.DeleteFunc(w.faults, func(f fault) bool { return !slices.Contains(names, f.name) })
	}
	if len(w.faults) == 0 {
		return nil, fmt.Errorf("mode %s has no fault named %q", m.name, o.only)
	}
	return w, nil
}

// open creates the node, the API server and the agent, and starts the traffic. In worlds with an odd
// seed, the first round begins while the agent starts.
func (w *world) open(ctx context.Context) (err error) {
	w.server = newAPIServer(w.seed)
	w.server.stream = w.rng.IntN(2) == 0
	if w.o.loseEvents {
		lost := 0
		w.server.lose = func() bool { lost++; return lost > 100 && lost%4 == 0 }
	}
	if w.oracle, err = newOracle(w.mode.nodePorts); err != nil {
		return err
	}
	if w.dir, err = os.MkdirTemp("", "chaos-agent-"); err != nil {
		return err
	}
	if w.node, err = newNode(); err != nil {
		return err
	}
	if w.env, err = w.mode.environment(); err != nil {
		return err
	}
	w.node.path = w.env.path
	if err := w.server.serve(w.node.Host); err != nil {
		return err
	}
	if w.agent, err = newAgent(w.o.nodeproxy, w.node, w.mode, w.env, w.dir); err != nil {
		return err
	}
	if err := w.node.serve(); err != nil {
		return err
	}
	w.stalls = stall.Start()
	w.traffic = &traffic{mode: w.mode, rate: w.o.rate, places: w.node.places, oracle: w.oracle, rec: w.rec, stalls: w.stalls}
	w.server.announce = func(r resource, name string, o object) {
		w.oracle.change(r, name, o)
		w.traffic.drain()
	}
	w.objects = newObjects(w.seed, w.o.services, w.server)
	w.objects.start()
	w.rec.setBroken(true)
	w.traffic.start(ctx, w.seed)
	if err := w.agent.start(); err != nil || w.seed%2 != 0 {
		return err
	}
	return w.judge(ctx)
}

func (w *world) close() {
	if w.traffic != nil && w.traffic.stop != nil {
		w.traffic.end()
	}
	if w.stalls != nil {
		w.stalls.Stop()
	}
	if w.agent != nil {
		w.agent.Kill()
	}
	if w.server != nil {
		w.server.close()
	}
	if w.env.close != nil {
		w.env.close()
	}
	if w.node != nil {
		w.node.lab.Close()
	}
	os.RemoveAll(w.dir)
}

// round makes some steps and judges the result. Faults remove rules in one round of two. In one world
// of three, no fault ends the agent, so that its resource usage is that of a long life.
func (w *world) round(ctx context.Context) error {
	w.rec.note("-- round %d", w.rounds+1)
	without := effect(0)
	if w.rng.IntN(2) == 0 {
		without |= outage
	}
	if w.seed%3 == 0 {
		without |= kills
	}
	faults := slices.DeleteFunc(slices.Clone(w.faults), func(f fault) bool { return f.effect&without != 0 })
	if w.rng.IntN(15) == 0 {
		w.rec.note("delete all Services")
		w.objects.deleteServices()
	}
	for range 1 + w.rng.IntN(maxSteps) {
		if err := w.step(faults); err != nil {
			return err
		}
		w.steps++
		w.pause()
	}
	w.server.locked(func() { w.server.misbehavior = misbehavior{} })
	w.agent.Process.Process.Signal(syscall.SIGCONT)
	w.rounds++
	return w.judge(ctx)
}

// pacedPause is long enough for most syncs.
const pacedPause = 100 * time.Millisecond

// pause waits after a step. In worlds with an even seed, the agent can bring most steps into
// effect one by one. In the others, it meets several at a time.
func (w *world) pause() {
	switch {
	case w.seed%2 == 0:
		time.Sleep(pacedPause)
	case w.rng.IntN(3) == 0:
		time.Sleep(time.Duration(w.rng.IntN(60)) * time.Millisecond)
	}
}

// step changes objects or runs a fault.
func (w *world) step(faults []fault) error {
	if w.rng.IntN(5) != 0 || len(faults) == 0 {
		w.rec.note("objects")
		w.objects.step()
		return nil
	}
	f := pick(w.rng, faults...)
	if f.effect&outage != 0 {
		w.rec.setBroken(true)
	}
	detail, err := f.run(w)
	w.rec.note("%s %s", f.name, detail)
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// toggle adds an address or a link to the node, or removes it.
func (w *world) toggle(what string) error {
	err := w.node.toggle(what)
	w.oracle.publish([2][]netip.Addr{w.node.addresses(0), w.node.addresses(1)}, 1)
	return err
}

// shell runs a command on the node and returns it, with its error if it failed.
func (w *world) shell(text string) string {
	if _, err := w.node.sh(text); err != nil {
		return fmt.Sprintf("%s: %v", text, err)
	}
	return text
}

// restart ends the agent with a signal, calls f, and starts the agent.
func (w *world) restart(s syscall.Signal, f func()) error {
	if err := w.agent.Stop(s); err != nil {
		w.rec.failf("%v", err)
	}
	if f != nil {
		f()
	}
	w.oracle.restarted.Store(true)
	return w.agent.start()
}

// pollInterval is the pause between two comparisons.
const pollInterval = 250 * time.Millisecond

// maxPrinted is how many failures of a world, and how many differences of a failure, are printed.
const maxPrinted = 10

// judge waits until the state is right, and then sends packets.
func (w *world) judge(ctx context.Context) error {
	start := time.Now()
	bad := w.wait(ctx)
	if ctx.Err() != nil {
		return nil
	}
	w.slowest = max(w.slowest, time.Since(start))
	if len(bad) != 0 {
		w.rec.failf("%d differences after %v:\n  %s", len(bad), w.o.settle, strings.Join(bad[:min(len(bad), maxPrinted)], "\n  "))
		w.rec.note("all differences:\n%s", strings.Join(bad, "\n"))
		return nil
	}
	w.oracle.inEffect()
	w.rec.setBroken(false)
	w.traffic.sample(w.rng.Uint64())
	return nil
}

// wrong lists what is not as it should be.
func (w *world) wrong() (bad []string, err error) {
	if err = w.agent.healthy(); err == nil {
		bad, err = w.agent.differences()
	}
	if err == nil && len(bad) == 0 {
		bad, err = w.staleFlows()
	}
	if err == nil && len(bad) == 0 && w.traffic.ctx.Err() == nil {
		bad = w.traffic.survey()
	}
	return bad, err
}

// wait waits until nothing is wrong, and returns what still is after -settle.
func (w *world) wait(ctx context.Context) []string {
	for start := time.Now(); ; time.Sleep(pollInterval) {
		bad, err := w.wrong()
		if err != nil {
			bad = append(bad, err.Error())
		}
		if len(bad) == 0 || w.stalls.Running(start, time.Now()) > w.o.settle || ctx.Err() != nil {
			return bad
		}
	}
}

// keep stores the log, the goroutines, the steps and the objects of a world that failed.
func (w *world) keep() error {
	if err := os.MkdirAll(w.o.dir, 0o755); err != nil {
		return err
	}
	base := filepath.Join(w.o.dir, fmt.Sprintf("%s-%d", w.mode.name, w.seed))
	log, err := os.ReadFile(w.agent.log)
	goroutines, _ := w.agent.get(metricsAddr+"/debug/pprof/goroutine?debug=1", time.Minute) // none if the agent has ended
	return errors.Join(err,
		os.WriteFile(base+".goroutines", []byte(goroutines), 0o644),
		os.WriteFile(base+".log", log, 0o644),
		os.WriteFile(base+".steps", []byte(lines(w.rec.steps)), 0o644),
		os.WriteFile(base+".json", encode(w.server.objects), 0o644))
}
