//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/internal/testing/stall"
)

// world is one node with an agent, an API server and traffic.
type world struct {
	o       *options
	mode    *mode
	seed    uint64
	rng     *rand.Rand
	node    *node
	server  *apiServer
	objects *objects
	oracle  *oracle
	traffic *traffic
	stalls  *stall.Detector
	faults  []fault
	// agent is the process that was started last.
	agent *process.Process
	// command runs nodeproxy, and args are the flags of agents. dir is the folder for all files, and tmp the one for the
	// agents' temporary files, which must be empty after a clean-up. log is the file to which agents append their output.
	command, args []string
	dir, tmp, log string
	// bpf is the agents' BPF file system in mode sockets.
	bpf string
	// restored is set if another program has restored an old state. If it did so between the
	// agent's reading and writing, chains that no rule leads to stay until the next full sync. Flows that
	// its rules began stay until they expire.
	restored bool
	closers  []func()

	rec *recorder
	// rounds and steps count what was made, and slowest is the longest time until a state was right.
	rounds, steps int
	slowest       time.Duration
}

// runWorld runs one world, prints the result and returns the number of failures. The error is about the
// test itself.
func (o *options) runWorld(ctx context.Context, m *mode, seed uint64, out *log.Logger) (failures int, err error) {
	start := time.Now()
	w, err := o.open(ctx, m, seed)
	defer w.close()
	if err != nil {
		return 0, err
	}
	// After a failure, later rounds would repeat the difference.
	for err == nil && w.rounds < o.rounds && w.goesOn(ctx) {
		err = w.round(ctx)
	}
	if err == nil && w.goesOn(ctx) {
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

func (w *world) goesOn(ctx context.Context) bool { return ctx.Err() == nil && !w.rec.failed() }

func lines(list []string) (text string) {
	for _, line := range list {
		text += "\n" + line
	}
	return text
}

// open creates a world with its node, API server and agent, and starts the traffic. In worlds with an odd
// seed, the first round begins while the agent starts. The caller must close the world, even after an error.
func (o *options) open(ctx context.Context, m *mode, seed uint64) (w *world, err error) {
	w = &world{
		o: o, mode: m, seed: seed, rng: rand.New(rand.NewPCG(seed, uint64(slices.Index(modes, m)))), faults: slices.Concat(commonFaults, m.faults),
		rec: &recorder{made: map[string]int{}}, server: newAPIServer(seed), stalls: stall.Start(),
	}
	w.atEnd(w.stalls.Stop)
	if inMachine() {
		w.faults = append(w.faults, machineFaults...)
	}
	if w.dir, err = os.MkdirTemp("", "chaos-agent-"); err != nil {
		return w, err
	}
	w.atEnd(func() { os.RemoveAll(w.dir) })
	w.node = newNode()
	w.atEnd(func() { w.node.lab.Close() })
	step := w.node.lab.Do
	step(w.prepareAgent)
	step(func() (err error) {
		w.oracle, err = newOracle(m.nodePorts)
		return err
	})
	step(func() error {
		l, err := w.node.Listen("tcp", apiAddress)
		if err != nil {
			return err
		}
		server := http.Server{Handler: w.server}
		server.SetKeepAlivesEnabled(false) // an agent's idle connections are no leak
		go server.Serve(l)
		w.atEnd(func() { server.Close() })
		return nil
	})
	step(func() error {
		w.server.stream = w.rng.IntN(2) == 0
		w.traffic = newTraffic(ctx, w)
		w.atEnd(w.traffic.end)
		w.server.announce = func(kind watch.EventType, o object) {
			w.oracle.change(kind, o)
			w.traffic.drain()
		}
		w.objects = newObjects(seed, o.services, w.server)
		w.objects.start()
		w.rec.setBroken(true)
		w.traffic.start(seed)
		w.atEnd(func() { w.agent.Kill() })
		return w.startAgent()
	})
	if err = w.node.lab.Err; err == nil && seed%2 == 0 {
		w.judge(ctx)
	}
	return w, err
}

// atEnd makes close call f before what it would call otherwise.
func (w *world) atEnd(f func()) { w.closers = append(w.closers, f) }

func (w *world) close() {
	for _, f := range slices.Backward(w.closers) {
		f()
	}
}

// round makes some steps and judges the result. In worlds in which no fault ends the agent, its resource usage is that of
// a long life.
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
	for range 1 + w.rng.IntN(25) {
		if err := w.step(faults); err != nil {
			return err
		}
		w.steps++
		// In worlds with an even seed, the agent can bring most steps into effect one by one. In the
		// others, it meets several at a time.
		switch {
		case w.seed%2 == 0:
			time.Sleep(100 * time.Millisecond)
		case w.rng.IntN(3) == 0:
			time.Sleep(time.Duration(w.rng.IntN(60)) * time.Millisecond)
		}
	}
	w.server.locked(func() { w.server.misbehavior = misbehavior{} })
	w.agent.Process.Signal(syscall.SIGCONT)
	w.rounds++
	w.judge(ctx)
	return nil
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
	w.restored = w.restored || f.effect&restores != 0
	detail, err := f.run(w)
	w.rec.note("%s %s", f.name, detail)
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// toggle adds an address or a link to the node, or removes it.
func (w *world) toggle(what string) error {
	addresses, err := w.node.toggle(what)
	w.oracle.publish(addresses, 1)
	return err
}

// maxPrinted is how many failures of a world, and how many differences of a failure, are printed.
const maxPrinted = 10

// judge waits until the state is right, and then makes connections that must be right.
func (w *world) judge(ctx context.Context) {
	start := time.Now()
	bad := w.until(ctx, w.o.settle, w.wrong)
	if ctx.Err() != nil {
		return
	}
	w.slowest = max(w.slowest, time.Since(start))
	if len(bad) != 0 {
		w.rec.failf("%d differences after %v:\n  %s", len(bad), w.o.settle, strings.Join(bad[:min(len(bad), maxPrinted)], "\n  "))
		w.rec.note("all differences:\n%s", strings.Join(bad, "\n"))
		return
	}
	w.oracle.inEffect()
	w.rec.setBroken(false)
	w.traffic.sample()
}

// wrong lists what is not as it should be.
func (w *world) wrong() (bad []string, err error) {
	if err = w.healthy(); err == nil {
		bad, err = w.differences()
	}
	if err == nil && len(bad) == 0 {
		bad, err = w.staleFlows()
	}
	if err == nil && len(bad) == 0 && w.traffic.ctx.Err() == nil {
		bad = w.traffic.survey()
	}
	return bad, err
}

// until calls wrong until it finds nothing, for a time that does not count stalls, and returns what it found last.
func (w *world) until(ctx context.Context, limit time.Duration, wrong func() ([]string, error)) []string {
	for start := time.Now(); ; sleep(ctx, 250*time.Millisecond) {
		bad, err := wrong()
		if err != nil {
			bad = append(bad, err.Error())
		}
		if len(bad) == 0 || w.stalls.Running(start, time.Now()) > limit || ctx.Err() != nil {
			return bad
		}
	}
}

// keep stores the log, the goroutines, the steps and the objects of a world that failed.
func (w *world) keep() error {
	if err := os.MkdirAll(w.o.dir, 0o755); err != nil {
		return err
	}
	log, err := os.ReadFile(w.log)
	goroutines, _ := w.get(metricsAddr+"/debug/pprof/goroutine?debug=1", time.Minute) // none if the agent has ended
	for name, text := range map[string][]byte{
		"log": log, "goroutines": []byte(goroutines), "steps": []byte(lines(w.rec.steps)), "json": encode(w.server.objects),
	} {
		file := fmt.Sprintf("%s-%d.%s", w.mode.name, w.seed, name)
		err = errors.Join(err, os.WriteFile(filepath.Join(w.o.dir, file), text, 0o644))
	}
	return err
}
