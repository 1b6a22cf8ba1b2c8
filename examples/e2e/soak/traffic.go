//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
)

// traffic is the traffic while Services change.
type traffic struct {
	*soak
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu   sync.Mutex
	held map[*held]bool
}

// held is a connection that stays open.
type held struct {
	service int
	from    *place
	to      target
	server  netip.AddrPort
	*netlab.Lines
	// leave is closed to ask for the end of the connection, and left at its end.
	leave, left chan struct{}
}

// workers is the number of connections opened at a time.
const workers = 16

// startTraffic starts all traffic.
func (s *soak) startTraffic(ctx context.Context) *traffic {
	t := &traffic{soak: s, held: map[*held]bool{}}
	t.ctx, t.stop = context.WithCancel(ctx)
	begin := func(n int, stream uint64, f func(*rand.Rand)) {
		for i := range n {
			t.wg.Go(func() { f(rand.New(rand.NewPCG(s.o.seed, stream<<32+uint64(i)))) })
		}
	}
	begin(workers, 1, t.visit)
	begin(min(60, s.o.services), 2, t.hold)
	begin(min(20, s.o.services), 3, t.talk)
	return t
}

// end ends the traffic.
func (t *traffic) end() {
	t.stop()
	t.wg.Wait()
}

// visit makes one connection after another and judges each.
func (t *traffic) visit(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		interval := workers * time.Second / time.Duration(t.o.rate)
		next := time.Now().Add(interval/2 + rand.N(interval))
		if _, to, ok := t.pop.pick(rng); ok {
			from, v := t.net.places[rng.IntN(len(t.net.places))], t.oracle.since()
			o := from.probe(t.ctx, to, patience(v.Trace(from.packet(to))))
			if t.ctx.Err() == nil {
				t.count(strings.ToLower(string(to.proto)), v, from, to, o)
			}
		}
		sleep(t.ctx, time.Until(next))
	}
}

// stalled excuses a loss that a stall of the machine caused, not the data plane.
const stalled = "while the machine stalled"

// count judges a connection and counts it. It reports whether the outcome was right.
func (s *soak) count(kind string, v *version, from *place, to target, o outcome) bool {
	err, reason := s.oracle.judge(v, from, to, o), ""
	if err != nil {
		err = fmt.Errorf("%s from %s: %w", to, from.name, err)
		intime := o
		intime.lost = 0
		late := to.proto == v1.ProtocolUDP && o.Kind == netlab.Silent || o.lost > 0 && s.oracle.judge(v, from, to, intime) == nil
		if late && s.stalls.Since(o.begun) { // excuses what was late, not what was wrong
			reason = stalled
		}
	}
	s.rec.result(kind, o.begun, reason, err)
	return err == nil
}

// hold keeps a connection open, and opens another one when it ends.
func (t *traffic) hold(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		if h := t.open(rng); h != nil {
			t.use(h, rng)
		}
		sleep(t.ctx, 100*time.Millisecond)
	}
}

// open opens a connection to a Service that forwards it, or returns nil.
func (t *traffic) open(rng *rand.Rand) *held {
	svc, to, ok := t.pop.pick(rng)
	from := t.net.places[rng.IntN(len(t.net.places))]
	if !ok || to.proto != v1.ProtocolTCP {
		return nil
	}
	v := t.oracle.since()
	if !t.lasts(from, v.Trace(from.packet(to))) {
		return nil
	}
	ctx, cancel := context.WithTimeout(t.ctx, connectTimeout)
	defer cancel()
	c, o := from.connect(ctx, to.to)
	if t.ctx.Err() != nil || !t.count("tcp", v, from, to, o) || c == nil {
		if c != nil {
			c.Close()
		}
		return nil
	}
	h := &held{service: svc.id, from: from, to: to, server: o.Server, Lines: c, leave: make(chan struct{}), left: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.pop.serves(h.service, h.server) { // drain came first
		c.Close()
		return nil
	}
	t.held[h] = true
	return h
}

// lasts reports whether a connection is forwarded and may live for as long as its endpoint. In
// mode ipvs, connections from this node's pods under externalTrafficPolicy Local end when the
// Service loses the external or load-balancer IP (ipvs/doc.go).
func (s *soak) lasts(from *place, v ruleset.Verdict) bool {
	if v.Action != ruleset.ActionForward {
		return false
	}
	return s.o.mode != "ipvs" || !from.isPod() || v.Frontend.Kind == ruleset.KindNodePort || !v.Frontend.ShortCircuit()
}

// heldTimeout bounds the wait for an answer through an open connection. It is longer than
// TCP takes to retransmit what it sent while rules were missing.
const heldTimeout = 90 * time.Second

// use sends lines through a connection until leave is closed.
func (t *traffic) use(h *held, rng *rand.Rand) {
	good := time.Now()
	defer func() {
		t.mu.Lock()
		delete(t.held, h)
		t.mu.Unlock()
		h.Close()
		close(h.left)
	}()
	for leaving := false; !leaving; {
		select {
		case <-t.ctx.Done():
			return
		case <-h.leave:
			leaving = true
		case <-time.After(500*time.Millisecond + time.Duration(rng.IntN(1000))*time.Millisecond):
		}
		err := h.Echo(time.Now().Add(heldTimeout))
		if err != nil {
			err = fmt.Errorf("open connection from %s to %s, served by %s: %w", h.from.name, h.to.to, h.server, err)
		}
		if t.rec.result("held", good, "", err); err != nil {
			return
		}
		good = time.Now()
	}
}

// drain closes the open connections to endpoints that the population does not have any more, after a
// last line through each, as a pod does when it ends. It does nothing before the traffic starts.
func (t *traffic) drain() {
	if t == nil {
		return
	}
	t.mu.Lock()
	var list []*held
	for h := range t.held {
		if !t.pop.serves(h.service, h.server) {
			list = append(list, h)
			delete(t.held, h)
			close(h.leave)
		}
	}
	t.mu.Unlock()
	for _, h := range list {
		<-h.left
	}
}

const (
	// talkInterval is the average time between two requests of a socket. A request counts
	// as lost after several attempts, each with talkTimeout and followed by talkPause.
	talkInterval = time.Second
	talkTimeout  = 2 * time.Second
	talkPause    = 200 * time.Millisecond
)

// talkTries returns the number of attempts of a request. Mode ipvs removes a UDP endpoint from the
// kernel one to two seconds after its removal from the Service (ipvs/DESIGN.md), and until then
// the endpoint answers.
func (o *options) talkTries() int {
	if o.mode == "ipvs" {
		return int(3 * time.Second / talkPause)
	}
	return 3
}

// talk sends requests from one UDP socket after another. Connection tracking keeps sending
// a socket's packets to the same endpoint, so the agent must delete the flow when the
// endpoint is removed.
func (t *traffic) talk(rng *rand.Rand) {
	for t.ctx.Err() == nil {
		_, to, ok := t.pop.pick(rng)
		from := t.net.places[rng.IntN(len(t.net.places))]
		if !ok || to.proto != v1.ProtocolUDP || t.oracle.since().Trace(from.packet(to)).Action != ruleset.ActionForward {
			sleep(t.ctx, 10*time.Millisecond)
			continue
		}
		c, err := from.dialUDP(t.ctx, to.to)
		if err != nil {
			t.rec.failf("cannot open a UDP socket at %s: %v", from.name, err)
			return
		}
		for n := 20 + rng.IntN(100); n > 0 && t.request(c, from, to); n-- {
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
	tries := t.o.talkTries()
	for range tries {
		o := ask(c, talkTimeout)
		if t.ctx.Err() != nil {
			return false
		}
		// A known flow may stay with an endpoint that gets no new connections.
		kept := o.Kind == netlab.Reached && t.oracle.hasEndpoint(v, from, to, o.Server)
		if err = t.oracle.judge(v, from, to, o); kept || err == nil {
			t.rec.result("talk", begun, "", nil)
			return kept // otherwise the Service is gone, or has no endpoints
		}
		sleep(t.ctx, talkPause)
	}
	t.rec.result("talk", begun, "", fmt.Errorf("UDP socket %s at %s to %s: %d requests, the last: %w", c.LocalAddr(), from.name, to.to, tries, err))
	return false
}
