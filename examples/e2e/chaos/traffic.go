//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
)

// traffic is the traffic to the Services of a world.
type traffic struct {
	*world
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup
	// held holds the connections that stay open, each a *held.
	held sync.Map
}

// held is a connection that stays open.
type held struct {
	attempt
	server netip.AddrPort

	mu sync.Mutex
	*netlab.Lines
	good time.Time // when the last line was answered
}

// Numbers of connections opened at a time, and of connections and sockets that stay open.
const visitors, holders, talkers = 8, 20, 10

func newTraffic(ctx context.Context, w *world) *traffic {
	t := &traffic{world: w}
	t.ctx, t.stop = context.WithCancel(ctx)
	return t
}

// start starts the traffic while Services change.
func (t *traffic) start(seed uint64) {
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

// visit makes one connection after another.
func (t *traffic) visit(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		interval := visitors * time.Second / time.Duration(t.o.rate)
		next := time.Now().Add(interval/2 + rand.N(interval))
		t.once(rng)
		sleep(t.ctx, time.Until(next))
	}
}

// sample makes connections when every change is in effect.
func (t *traffic) sample() {
	var wg sync.WaitGroup
	for range visitors {
		rng := rand.New(rand.NewPCG(t.rng.Uint64(), 0))
		wg.Go(func() {
			for range 8 {
				t.once(rng)
			}
		})
	}
	wg.Wait()
}

// survey connects to each frontend from a random place, and lists the outcomes that the latest version does not
// have.
func (t *traffic) survey() (bad []string) {
	v, rng := t.oracle.now(), rand.New(rand.NewPCG(rand.Uint64(), 0))
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(visitors)
	for _, svc := range v.Ports {
		for _, f := range svc.Frontends {
			to, ok := targetOf(rng, svc, f)
			a := newAttempt(pick(rng, t.node.places...), to, v)
			if !ok || a.Action == ruleset.ActionPass || a.Port != nil && dead(a.Port) || !t.mode.judges(a.Verdict) {
				continue
			}
			g.Go(func() error {
				if err := v.check(a.from, a.probe(t.ctx), a.Verdict); err != nil {
					mu.Lock()
					defer mu.Unlock()
					bad = append(bad, fmt.Sprintf("%v: %v", a, err))
				}
				return nil
			})
		}
	}
	g.Wait()
	return bad
}

// choose chooses a destination and a place to connect from.
func (t *traffic) choose(rng *rand.Rand) (a attempt, ok bool) {
	to, ok := t.oracle.pick(rng)
	return newAttempt(pick(rng, t.node.places...), to, t.oracle.since()), ok
}

// once makes a connection and judges it. If the Service has affinity, once makes another one. In mode
// iptables, first connections that the client opens at the same moment may go to different endpoints:
// each looks for an endpoint before the other has stored its own. All later ones go to one of them.
func (t *traffic) once(rng *rand.Rand) {
	a, ok := t.choose(rng)
	if !ok || !t.mode.judges(a.Verdict) {
		return
	}
	o := a.probe(t.ctx)
	right := t.count(strings.ToLower(string(a.proto)), a, o)
	unchanged := func() bool { return t.oracle.since() == a.v && t.oracle.now() == a.v }
	if !right || o.Kind != netlab.Reached || a.Affinity < minAffinity || !unchanged() {
		return
	}
	again := a.probe(t.ctx)
	if again.Kind == netlab.Reached && again.Server != o.Server {
		o, again = again, a.probe(t.ctx)
	}
	if again.Kind == netlab.Reached && again.Server != o.Server && unchanged() {
		again.Kind, again.Err = netlab.Failed, fmt.Errorf("with affinity the client goes to %s and then to %s", o.Server, again.Server)
	}
	t.count("affinity", a, again)
}

// minAffinity is the shortest affinity that lasts from one connection to the next.
const minAffinity = time.Minute

// count judges a connection and counts it, unless the traffic has ended. It reports whether the
// outcome was right.
func (t *traffic) count(kind string, a attempt, o outcome) bool {
	if t.ctx.Err() != nil {
		return false
	}
	err, stalled := t.oracle.judge(a, o), false
	if err != nil {
		err = fmt.Errorf("%v: %w", a, err)
		intime := o
		intime.lost = 0
		// Stalls excuse what was late, not what was wrong. The servers of this process answer late, too.
		late := a.proto == v1.ProtocolUDP && o.Kind == netlab.Silent || o.lost > 0 && t.oracle.judge(a, intime) == nil
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
			for t.line(h) {
				sleep(t.ctx, 500*time.Millisecond+time.Duration(rng.IntN(1000))*time.Millisecond)
			}
			end()
			h.Close()
			t.held.Delete(h)
		}
		sleep(t.ctx, 100*time.Millisecond)
	}
}

// open opens a connection to a Service that forwards it, or returns nil.
func (t *traffic) open(rng *rand.Rand) *held {
	a, ok := t.choose(rng)
	if !ok || a.proto != v1.ProtocolTCP || !t.mode.keeps(a.from, a.Verdict) || dead(a.Port) {
		return nil
	}
	c, o := a.connect(t.ctx)
	right := t.count("tcp", a, o)
	if c == nil {
		return nil
	}
	h := &held{attempt: a, server: o.Server, Lines: c, good: time.Now()}
	t.held.Store(h, nil)
	if !right || !t.oracle.keeps(h.Port.Key, h.server) { // drain came first, or another Service has the address
		c.Close()
	}
	return h
}

// heldTimeout bounds the wait for an answer through an open connection. It is longer than
// TCP takes to retransmit what it sent while rules were missing.
const heldTimeout = 90 * time.Second

// line sends a line through a connection. It reports whether the connection is still open.
func (t *traffic) line(h *held) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.Echo(time.Now().Add(heldTimeout))
	if errors.Is(err, net.ErrClosed) { // by this process
		return false
	}
	if err != nil {
		err = fmt.Errorf("open connection %v, served by %s: %w", h.attempt, h.server, err)
	}
	t.rec.result("held", h.good, false, err)
	h.good = time.Now()
	return err == nil
}

// drain closes the open connections to endpoints that their Services do not have any more, after a
// last line through each, as a pod does when it ends. While rules are missing a line may take long, so
// drain leaves it out.
func (t *traffic) drain() {
	for key := range t.held.Range {
		if h := key.(*held); !t.oracle.keeps(h.Port.Key, h.server) {
			if !t.rec.brokenSince(time.Now()) {
				t.line(h)
			}
			h.Close()
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
		a, ok := t.choose(rng)
		if !ok || a.proto != v1.ProtocolUDP || a.Action != ruleset.ActionForward || dead(a.Port) {
			sleep(t.ctx, 10*time.Millisecond)
			continue
		}
		c, err := a.dialUDP(t.ctx)
		if err != nil {
			if t.ctx.Err() == nil {
				t.rec.failf("cannot open a UDP socket: %v: %v", a, err)
			}
			return
		}
		for n := 5 + rng.IntN(50); n > 0 && t.request(c, newAttempt(a.from, a.target, t.oracle.since())); n-- {
			sleep(t.ctx, talkInterval/2+time.Duration(rng.Int64N(int64(talkInterval))))
		}
		c.Close()
	}
}

// request sends a request until an endpoint answers. It reports whether the socket can send
// another request.
func (t *traffic) request(c net.Conn, a attempt) bool {
	begun := time.Now()
	var err error
	for range talkTries {
		o := ask(t.ctx, c, talkTimeout)
		if t.ctx.Err() != nil {
			return false
		}
		// A known flow may stay with an endpoint that gets no new connections.
		kept := o.Kind == netlab.Reached && slices.ContainsFunc(t.oracle.ports(a), func(s *ruleset.Port) bool { return s != nil && has(s, o.Server) })
		if err = t.oracle.judge(a, o); kept || t.oracle.forgotten(a) || err == nil {
			t.rec.result("talk", begun, false, nil)
			return kept // otherwise the Service is gone, or has no endpoints
		}
		sleep(t.ctx, talkPause)
	}
	t.rec.result("talk", begun, false, fmt.Errorf("UDP socket %s to %v: %d requests, the last: %w", c.LocalAddr(), a, talkTries, err))
	return false
}

// sleep waits for the duration or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
