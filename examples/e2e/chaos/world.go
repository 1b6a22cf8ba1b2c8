//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// world is one node with an agent, and an API server.
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
	faults  []fault
	// restored is set if another program has restored an old state. If it did so between the
	// agent's reading and writing, chains that no rule leads to stay until the next full sync.
	restored bool

	steps  []string
	result result
}

// result is the outcome of a world.
type result struct {
	mode             string
	seed             uint64
	rounds, failures int
	steps            int
	took, slowest    time.Duration
	text             string
}

func (r *result) String() string {
	return fmt.Sprintf("%-9s seed %d: %d rounds, %d steps in %v, state right after %v at most, %d failed\n%s",
		r.mode, r.seed, r.rounds, r.steps, r.took.Round(100*time.Millisecond), r.slowest.Round(10*time.Millisecond), r.failures, r.text)
}

// maxSteps is the greatest number of steps of a round.
const maxSteps = 25

// runWorld runs one world. The error is about the test itself.
func (o *options) runWorld(ctx context.Context, m *mode, seed uint64) (*result, error) {
	h := fnv.New64a()
	h.Write([]byte(m.name))
	w := &world{o: o, mode: m, seed: seed, rng: rand.New(rand.NewPCG(seed, h.Sum64())), faults: o.chosenFaults(m)}
	if len(w.faults) == 0 {
		return nil, fmt.Errorf("mode %s has no fault named %q", m.name, o.only)
	}
	w.result = result{mode: m.name, seed: seed}
	start := time.Now()
	defer w.close()
	if err := w.open(); err != nil {
		return nil, err
	}
	for range o.rounds {
		if ctx.Err() != nil {
			break
		}
		if err := w.round(ctx); err != nil {
			return nil, errors.Join(err, w.keep())
		}
		if w.result.failures != 0 {
			break // later rounds would repeat the difference
		}
	}
	w.result.took = time.Since(start)
	if w.result.failures != 0 {
		return &w.result, w.keep()
	}
	return &w.result, nil
}

// chosenFaults returns the faults of a mode that the options select.
func (o *options) chosenFaults(m *mode) []fault {
	all := slices.Concat(commonFaults, m.faults)
	if inMachine() {
		all = append(all, machineFaults...)
	}
	if o.only == "" {
		return all
	}
	names := strings.Split(o.only, ",")
	return slices.DeleteFunc(all, func(f fault) bool { return !slices.Contains(names, f.name) })
}

// open creates the node, the API server and the agent.
func (w *world) open() (err error) {
	if w.dir, err = os.MkdirTemp("", "chaos-world-"); err != nil {
		return err
	}
	if w.node, err = newNode(nil); err != nil {
		return err
	}
	if w.env, err = w.mode.environment(); err != nil {
		return err
	}
	w.server = newAPIServer(w.seed)
	w.server.stream = w.rng.IntN(2) == 0
	if w.o.loseEvents {
		lost := 0
		w.server.lose = func() bool { lost++; return lost > 100 && lost%4 == 0 }
	}
	if err := w.server.serve(w.node.Host); err != nil {
		return err
	}
	w.objects = newObjects(w.seed, w.server)
	w.objects.start()
	if w.agent, err = newAgent(w.o.nodeproxy, w.node, w.mode, w.env, w.dir, "agent"); err != nil {
		return err
	}
	return w.agent.Start()
}

func (w *world) close() {
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
		w.node.close()
	}
	os.RemoveAll(w.dir)
}

// round makes some steps and compares the result with that of a new agent.
func (w *world) round(ctx context.Context) error {
	w.note("-- round %d", w.result.rounds+1)
	if w.rng.IntN(15) == 0 {
		w.note("delete all Services")
		w.objects.deleteServices()
	}
	for range 1 + w.rng.IntN(maxSteps) {
		if err := w.step(); err != nil {
			return err
		}
		w.result.steps++
		w.pause()
	}
	w.server.behave()
	w.agent.Process().Signal(syscall.SIGCONT)
	w.result.rounds++
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
func (w *world) step() error {
	if w.rng.IntN(5) != 0 {
		w.note("objects")
		w.objects.step()
		return nil
	}
	f := pick(w.rng, w.faults...)
	detail, err := f.run(w)
	w.note("%s %s", f.name, detail)
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// note records a step.
func (w *world) note(format string, args ...any) {
	w.steps = append(w.steps, time.Now().UTC().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// shell runs a command on the node and returns it, with its error if it failed.
func (w *world) shell(text string) string {
	if _, err := w.node.Output("sh", "-c", text); err != nil {
		return fmt.Sprintf("%s: %v", text, err)
	}
	return text
}

// restart ends the agent with a signal, calls f, and starts the agent.
func (w *world) restart(s syscall.Signal, f func()) error {
	if err := w.agent.Stop(s); err != nil {
		w.fail(err.Error())
	}
	if f != nil {
		f()
	}
	return w.agent.Start()
}

// fail records a failure.
func (w *world) fail(text string) {
	w.result.failures++
	w.result.text += text + "\n"
	w.note("FAILED %s", text)
}

// pollInterval is the pause between two comparisons.
const pollInterval = 250 * time.Millisecond

// maxPrinted is how many differences a failure prints.
const maxPrinted = 10

// judge compares the state with that of a new agent on a new node.
func (w *world) judge(ctx context.Context) error {
	fresh, err := w.fresh()
	if err != nil {
		return err
	}
	defer fresh.close()
	start := time.Now()
	var bad []string
	for {
		if bad = w.wrong(fresh); len(bad) == 0 || time.Since(start) > w.o.settle || ctx.Err() != nil {
			break
		}
		time.Sleep(pollInterval)
	}
	if ctx.Err() != nil {
		return nil
	}
	w.result.slowest = max(w.result.slowest, time.Since(start))
	if len(bad) != 0 {
		w.fail(fmt.Sprintf("%d differences after %v:\n  %s", len(bad), w.o.settle, strings.Join(bad[:min(len(bad), maxPrinted)], "\n  ")))
		w.note("all differences:\n%s", strings.Join(bad, "\n"))
	}
	return nil
}

// fresh returns a world with the same objects and node, and a new agent.
func (w *world) fresh() (f *world, err error) {
	f = &world{o: w.o, mode: w.mode, server: w.server.copyOf()}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if f.dir, err = os.MkdirTemp("", "chaos-fresh-"); err != nil {
		return nil, err
	}
	if f.node, err = newNode(w.node); err != nil {
		return nil, err
	}
	if f.env, err = w.mode.environment(); err != nil {
		return nil, err
	}
	if err = f.server.serve(f.node.Host); err != nil {
		return nil, err
	}
	if f.agent, err = newAgent(w.o.nodeproxy, f.node, w.mode, f.env, f.dir, "fresh"); err != nil {
		return nil, err
	}
	return f, f.agent.Start()
}

// wrong lists what is not as it should be.
func (w *world) wrong(fresh *world) []string {
	if err := w.agent.Ended(); err != nil {
		return []string{err.Error()}
	}
	if err := errors.Join(w.agent.crashed(), fresh.agent.crashed()); err != nil {
		return []string{err.Error()}
	}
	if !fresh.agent.synced() {
		return []string{"the new agent has not synced"}
	}
	if err := w.agent.healthy(); err != nil {
		return []string{err.Error()}
	}
	got, errGot := w.mode.read(w.node, w.env)
	want, errWant := w.mode.read(fresh.node, fresh.env)
	if err := errors.Join(errGot, errWant); err != nil {
		return []string{err.Error()}
	}
	if w.restored {
		got, want = got.withoutUnused(), want.withoutUnused()
	}
	return got.differences(want)
}

// keep stores the log, the steps and the objects of a world that failed.
func (w *world) keep() error {
	if err := os.MkdirAll(w.o.dir, 0o755); err != nil {
		return err
	}
	base := filepath.Join(w.o.dir, fmt.Sprintf("%s-%d", w.mode.name, w.seed))
	log, err := os.ReadFile(w.agent.Log)
	return errors.Join(err,
		os.WriteFile(base+".log", log, 0o644),
		os.WriteFile(base+".steps", []byte(strings.Join(w.steps, "\n")+"\n"), 0o644),
		os.WriteFile(base+".json", w.server.dump(), 0o644))
}
