//go:build linux

package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// traffic is the traffic to the Services of a world.
type traffic struct {
	mode   *mode
	rate   int
	places []*place
	oracle *oracle
	rec    *recorder
	stalls *stall.Detector
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup

	mu   sync.Mutex
	held map[*held]bool
}

// held is a connection that stays open.
type held struct {
	service tracker.Key
	from    *place
	to      target
	server  netip.AddrPort

	mu sync.Mutex
	*netlab.Lines
	good   time.Time // when the last line was answered
	closed bool
}

const (
	// Numbers of connections opened at a time, and of connections and sockets that stay open.
	visitors, holders, talkers = 8, 20, 10
	// sampled is the number of connections after each round.
	sampled = 60
)

// start starts the traffic while Services change.
func (t *traffic) start(ctx context.Context, seed uint64) {
	t.ctx, t.stop = context.WithCancel(ctx)
	t.held = map[*held]bool{}
	begin := func(n int, stream uint64, f func(*rand.Rand)) {
		for i := range n {
			t.wg.Go(func() { f(rand.New(rand.NewPCG(seed, stream<<32+uint64(i)))) })
		}
	}
	begin(visitors, 1, t.visit)
	begin(holders, 2, t.hold)
	begin(talkers, 3, t.talk)
}

func (t *traffic) end() {
	t.stop()
	t.wg.Wait()
}

// visit makes one connection after another and judges each.
func (t *traffic) visit(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		interval := visitors * time.Second / time.Duration(t.rate)
		next := time.Now().Add(interval/2 + rand.N(interval))
		if to, ok := t.oracle.pick(rng); ok {
			t.once(rng, strings.ToLower(string(to.proto)), to)
		}
		sleep(t.ctx, time.Until(next))
	}
}

// sample makes connections when every change is in effect.
func (t *traffic) sample(seed uint64) {
	var wg sync.WaitGroup
	for i := range visitors {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for range sampled / visitors {
				if to, ok := t.oracle.pick(rng); ok {
					t.once(rng, "sampled", to)
				}
			}
		})
	}
	wg.Wait()
}

// survey connects to each frontend from a random place, and lists the outcomes that the latest version does not
// have.
func (t *traffic) survey() (bad []string) {
	v, todo := t.oracle.now(), make(chan target)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range visitors {
		wg.Go(func() {
			for to := range todo {
				from := t.places[rand.IntN(len(t.places))]
				verdict := v.Trace(from.packet(to, v))
				if verdict.Action == ruleset.ActionPass || verdict.Port != nil && dead(verdict.Port) || !t.mode.judges(verdict) {
					continue
				}
				if err := from.check(from.probe(t.ctx, to, timeoutOf(verdict)), verdict, v); err != nil {
					mu.Lock()
					bad = append(bad, fmt.Sprintf("%s from %s: %v", to, from.name, err))
					mu.Unlock()
				}
			}
		})
	}
	for _, svc := range v.Ports {
		for _, f := range svc.Frontends {
			if to, ok := targetOf(rand.IntN, svc, f); ok {
				todo <- to
			}
		}
	}
	close(todo)
	wg.Wait()
	return bad
}

// once makes a connection and judges it. If the Service has affinity, once makes another one. In mode
// iptables, first connections that the client opens at the same moment may go to different endpoints:
// each looks for an endpoint before the other has stored its own. All later ones go to one of them.
func (t *traffic) once(rng *rand.Rand, kind string, to target) {
	from, v := t.places[rng.IntN(len(t.places))], t.oracle.since()
	verdict := v.Trace(from.packet(to, v))
	if !t.mode.judges(verdict) {
		return
	}
	o := from.probe(t.ctx, to, timeoutOf(verdict))
	if !t.count(kind, v, from, to, o) || o.Kind != netlab.Reached || verdict.Affinity < minAffinity || t.oracle.since() != v || len(t.oracle.until(v)) > 1 {
		return
	}
	again := from.probe(t.ctx, to, connectTimeout)
	if again.Kind == netlab.Reached && again.Server != o.Server {
		o, again = again, from.probe(t.ctx, to, connectTimeout)
	}
	if again.Kind == netlab.Reached && again.Server != o.Server && len(t.oracle.until(v)) == 1 {
		again.Kind, again.Err = netlab.Failed, fmt.Errorf("with affinity the client goes to %s and then to %s", o.Server, again.Server)
	}
	t.count("affinity", v, from, to, again)
}

// minAffinity is the shortest affinity that lasts from one connection to the next.
const minAffinity = time.Minute

// count judges a connection and counts it, unless the traffic has ended. It reports whether the
// outcome was right.
func (t *traffic) count(kind string, v *version, from *place, to target, o outcome) bool {
	if t.ctx.Err() != nil {
		return false
	}
	err, stalled := t.oracle.judge(v, from, to, o), false
	if err != nil {
		err = fmt.Errorf("%s from %s: %w", to, from.name, err)
		intime := o
		intime.lost = 0
		// Stalls excuse what was late, not what was wrong. The servers of this process answer late, too.
		late := to.proto == v1.ProtocolUDP && o.Kind == netlab.Silent || o.lost > 0 && t.oracle.judge(v, from, to, intime) == nil
		stalled = late && t.stalls.Since(o.begun) || o.Kind == netlab.Silent && t.stalls.Running(o.begun, time.Now()) < time.Since(o.begun)/2
	}
	t.rec.result(kind, o.begun, stalled, err)
	return err == nil
}

// hold keeps a connection open, and opens another one when it ends.
func (t *traffic) hold(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		if h := t.open(rng); h != nil {
			end := context.AfterFunc(t.ctx, func() { h.Close() })
			for t.line(h, false) {
				sleep(t.ctx, 500*time.Millisecond+time.Duration(rng.IntN(1000))*time.Millisecond)
			}
			end()
		}
		sleep(t.ctx, 100*time.Millisecond)
	}
}

// open opens a connection to a Service that forwards it, or returns nil.
func (t *traffic) open(rng *rand.Rand) *held {
	to, ok := t.oracle.pick(rng)
	from := t.places[rng.IntN(len(t.places))]
	if !ok || to.proto != v1.ProtocolTCP {
		return nil
	}
	v := t.oracle.since()
	verdict := v.Trace(from.packet(to, v))
	if !t.mode.keeps(from, verdict) || dead(verdict.Port) {
		return nil
	}
	ctx, cancel := context.WithTimeout(t.ctx, connectTimeout)
	defer cancel()
	c, o := from.connect(ctx, to.to)
	if right := t.count("tcp", v, from, to, o); c == nil {
		return nil
	} else if h := (&held{service: verdict.Port.Key, from: from, to: to, server: o.Server, Lines: c, good: time.Now()}); right {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.oracle.keeps(h.service, h.server) { // otherwise drain came first, or another Service has the address
			t.held[h] = true
			return h
		}
	}
	c.Close()
	return nil
}

// heldTimeout bounds the wait for an answer through an open connection. It is longer than
// TCP takes to retransmit what it sent while rules were missing.
const heldTimeout = 90 * time.Second

// line sends a line through a connection, the last one if last is set. It reports whether the
// connection is still open.
func (t *traffic) line(h *held, last bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	err := h.Echo(time.Now().Add(heldTimeout))
	if t.ctx.Err() == nil {
		if err != nil {
			err = fmt.Errorf("open connection from %s to %s, served by %s: %w", h.from.name, h.to.to, h.server, err)
		}
		t.rec.result("held", h.good, false, err)
		h.good = time.Now()
	}
	if h.closed = last || err != nil; h.closed {
		h.Close()
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.held, h)
	}
	return !h.closed
}

// drain closes the open connections to endpoints that their Services do not have any more, after a
// last line through each, as a pod does when it ends. While rules are missing a line may take long, so
// drain leaves it out.
func (t *traffic) drain() {
	t.mu.Lock()
	list := slices.Collect(maps.Keys(t.held))
	t.mu.Unlock()
	for _, h := range list {
		switch {
		case t.oracle.keeps(h.service, h.server):
		case t.rec.isBroken():
			h.Close() // the next line fails, which is excused
		default:
			t.line(h, true)
		}
	}
}

const (
	// talkInterval is the average time between two requests of a socket. A request counts
	// as lost after several attempts, each with talkTimeout and followed by talkPause. Mode ipvs
	// removes a UDP endpoint from the kernel one to two seconds after its removal from the Service
	// (ipvs/DESIGN.md), and until then the endpoint answers.
	talkInterval = time.Second
	talkTimeout  = 2 * time.Second
	talkPause    = 200 * time.Millisecond
	talkTries    = int(3 * time.Second / talkPause)
)

// talk sends requests from one UDP socket after another. Connection tracking keeps sending
// a socket's packets to the same endpoint, so the agent must delete the flow when the
// endpoint is removed.
func (t *traffic) talk(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		to, ok := t.oracle.pick(rng)
		from, v := t.places[rng.IntN(len(t.places))], t.oracle.since()
		verdict := v.Trace(from.packet(to, v))
		if !ok || to.proto != v1.ProtocolUDP || verdict.Action != ruleset.ActionForward || dead(verdict.Port) {
			sleep(t.ctx, 10*time.Millisecond)
			continue
		}
		c, err := from.dialUDP(t.ctx, to.to)
		if err != nil {
			if t.ctx.Err() == nil {
				t.rec.failf("cannot open a UDP socket at %s: %v", from.name, err)
			}
			return
		}
		for n := 5 + rng.IntN(50); n > 0 && t.request(c, from, to); n-- {
			sleep(t.ctx, talkInterval/2+time.Duration(rng.Int64N(int64(talkInterval))))
		}
		c.Close()
	}
}

// request sends a request until an endpoint answers. It reports whether the socket can send
// another request.
func (t *traffic) request(c net.Conn, from *place, to target) bool {
	v := t.oracle.since()
	begun := time.Now()
	var err error
	for range talkTries {
		o := ask(t.ctx, c, talkTimeout)
		if t.ctx.Err() != nil {
			return false
		}
		// A known flow may stay with an endpoint that gets no new connections.
		kept := o.Kind == netlab.Reached && t.oracle.hasEndpoint(v, from, to, o.Server)
		if err = t.oracle.judge(v, from, to, o); kept || t.oracle.forgotten(v, from, to) || err == nil {
			t.rec.result("talk", begun, false, nil)
			return kept // otherwise the Service is gone, or has no endpoints
		}
		sleep(t.ctx, talkPause)
	}
	t.rec.result("talk", begun, false, fmt.Errorf("UDP socket %s at %s to %s: %d requests, the last: %w", c.LocalAddr(), from.name, to.to, talkTries, err))
	return false
}

// sleep waits for the duration or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
