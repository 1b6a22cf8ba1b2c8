package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// place is where a socket is.
type place struct {
	at    netip.AddrPort
	proto v1.Protocol
}

// binding is a place that some Service has.
type binding struct {
	place
	// exact and nodePort are the frontends that are there, each of which may be
	// nil: a node's own address may be a Service's external IP as well, which goes
	// before a NodePort.
	exact, nodePort *rule
	// rule is the one that counts, as the socket's goroutines see it.
	rule   atomic.Pointer[rule]
	socket socket // nil if none is needed, or it could not be opened
	heard  audience
	// held is the address, nil for one that is the node's anyway. Connections enter
	// themselves there.
	held atomic.Pointer[address]
}

// socket is a listening one.
type socket interface {
	// listenTo changes whom it answers.
	listenTo(audience) error
	// close ends it; what it has accepted goes on, if it can.
	close()
}

// address is one that is held for Services.
type address struct {
	uses int

	mu    sync.Mutex
	gone  bool
	conns map[*conn]struct{}
}

// enter notes a connection by the address, which is cut when the address goes.
func (a *address) enter(c *conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.gone {
		c.cut()
		return
	}
	a.conns[c] = struct{}{}
}

func (a *address) leave(c *conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.conns, c)
}

// Backend is a data plane in userspace, a [ruleset.Backend]. It is made by [New]
// and ended by [Backend.Shutdown]. Its methods are safe for concurrent use.
type Backend struct {
	config Config

	// ctx is ended when everything is to end.
	ctx    context.Context
	cancel context.CancelFunc
	// running is the goroutines of sockets, connections and sessions.
	running sync.WaitGroup

	sockets     atomic.Int64
	connections atomic.Int64
	sessions    sessions
	stats       counters

	// mu is held by Apply and Shutdown.
	mu        sync.Mutex
	closed    bool
	near      *near
	services  map[tracker.Key]*service
	bindings  map[place]*binding
	addresses map[netip.Addr]*address
}

// Listens reports whether there is a socket at an address and port, over
// [v1.ProtocolTCP] or [v1.ProtocolUDP], by which endpoints are reached.
func (b *Backend) Listens(at netip.AddrPort, protocol v1.Protocol) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	bi := b.bindings[place{at, protocol}]
	return bi != nil && bi.socket != nil
}

// counters is the part of [Stats] that only grows.
type counters struct {
	accepted, limited, dialFailures, evicted atomic.Uint64
}

// Stats is what a [Backend] has to do, and did.
type Stats struct {
	// Sockets is how many are open to listen.
	Sockets int
	// Connections and Sessions are how many there are now.
	Connections, Sessions int
	// Accepted is how many TCP connections were accepted, Limited how many of them
	// were reset because there were too many.
	Accepted, Limited uint64
	// DialFailures is how often an endpoint could not be reached.
	DialFailures uint64
	// Evicted is how many UDP sessions were ended to make room.
	Evicted uint64
}

// New returns a Backend that does nothing yet. The error is an [ErrConfig].
//
// It starts no goroutine; sockets that listen are opened by Apply, on the thread
// that calls it, and so in that thread's network namespace.
func New(c Config) (*Backend, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	b := &Backend{
		config: c, ctx: ctx, cancel: cancel,
		services:  map[tracker.Key]*service{},
		bindings:  map[place]*binding{},
		addresses: map[netip.Addr]*address{},
	}
	b.sessions.max = c.MaxSessions
	return b, nil
}

// Stats returns the figures of this moment.
func (b *Backend) Stats() Stats {
	return Stats{
		Sockets:     int(b.sockets.Load()),
		Connections: int(b.connections.Load()), Sessions: b.sessions.len(),
		Accepted: b.stats.accepted.Load(), Limited: b.stats.limited.Load(),
		DialFailures: b.stats.dialFailures.Load(), Evicted: b.stats.evicted.Load(),
	}
}

// Apply makes the sockets agree with d. A Service that cannot have the sockets it
// needs, as when another program has the port, fails in a
// [*ruleset.PartialError], with those that it can have open.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return ErrClosed
	}
	moved := false
	if d.Full || d.Node != d.OldNode || b.near == nil {
		own, err := b.config.Addresses.Own()
		if err != nil {
			return fmt.Errorf("dataplane: the node's addresses: %w", err)
		}
		moved = b.look(own, d.Node.LocalTraffic)
	}
	wants := b.wants(d, moved || d.Node != d.OldNode)

	// A place that another Service is about to have is not given up in between.
	next := map[slot]bool{}
	for i := range wants {
		for _, f := range wants[i].frontends {
			next[f.slot()] = true
		}
	}
	for i := range wants {
		w := &wants[i]
		if w.service == nil {
			continue
		}
		for _, p := range w.service.places {
			if !slices.ContainsFunc(w.frontends, func(f bound) bool { return f.place == p }) {
				b.unbind(p, w.service, next)
			}
		}
	}
	for i := range wants {
		w := &wants[i]
		switch {
		case w.now == nil && w.service != nil:
			w.service.remove()
			delete(b.services, w.key)
		case w.now != nil && w.service == nil:
			w.service = newService(w.now, methodOf(w.now, b.config.Algorithm(w.now), d.Node), b.config.Drain)
			b.services[w.key] = w.service
		case w.now != nil:
			w.service.set(w.now, methodOf(w.now, b.config.Algorithm(w.now), d.Node))
		}
	}
	failed := map[tracker.Key]error{}
	for i := range wants {
		w := &wants[i]
		if w.now == nil {
			continue
		}
		w.service.places = w.service.places[:0]
		var errs []error
		for _, f := range w.frontends {
			w.service.places = append(w.service.places, f.place)
			errs = append(errs, b.bind(f.place, &rule{w.service, f.frontend, b.near}))
		}
		if err := errors.Join(errs...); err != nil {
			failed[w.key] = err
		}
	}
	if d.Full {
		if err := b.prune(); err != nil {
			return err
		}
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// want is what a Service is to be.
type want struct {
	key       tracker.Key
	now       *ruleset.Service // nil: gone
	service   *service         // as it was, nil: new
	frontends []bound
}

// bound is a frontend at one place.
type bound struct {
	place
	frontend ruleset.Frontend
}

// slot is one of the two rules of a place's [binding].
type slot struct {
	place
	nodePort bool
}

func (f bound) slot() slot { return slot{f.place, f.frontend.Kind == ruleset.NodePort} }

// wants returns what a delta asks for: of the Services in it, and of all if the
// node is another.
func (b *Backend) wants(d *ruleset.Delta, node bool) []want {
	out := make([]want, 0, len(d.Changes))
	add := func(k tracker.Key, now *ruleset.Service) {
		if now != nil && k.Protocol != v1.ProtocolTCP && k.Protocol != v1.ProtocolUDP {
			b.config.Log.Warn("not served, as there is only TCP and UDP", "service", k)
			now = nil
		}
		w := want{key: k, now: now, service: b.services[k]}
		if now != nil {
			w.frontends = b.places(now, d.Node)
		}
		if w.now != nil || w.service != nil {
			out = append(out, w)
		}
	}
	seen := map[tracker.Key]bool{}
	for i := range d.Changes {
		add(d.Changes[i].Key, d.Changes[i].New)
		if d.Full || node {
			seen[d.Changes[i].Key] = true
		}
	}
	for k, s := range b.services {
		switch {
		case seen[k]:
		case d.Full:
			add(k, nil)
		case node:
			add(k, s.now.Load())
		}
	}
	return out
}

// places returns where a Service's frontends are.
func (b *Backend) places(svc *ruleset.Service, n *ruleset.Node) []bound {
	out := make([]bound, 0, len(svc.Frontends))
	for _, f := range svc.Frontends {
		if f.Kind != ruleset.NodePort {
			out = append(out, bound{place{netip.AddrPortFrom(f.Addr, f.Port), svc.Key.Protocol}, f})
			continue
		}
		ports := n.NodePorts(svc.Key.Family)
		for _, a := range b.near.own {
			if tracker.FamilyOf(a) == svc.Key.Family && ports.Allows(a) {
				out = append(out, bound{place{netip.AddrPortFrom(a, f.Port), svc.Key.Protocol}, f})
			}
		}
	}
	return out
}

// look takes over the node's own addresses, and how pods are told, and reports
// whether they are others than before.
func (b *Backend) look(own []netip.Addr, pods ruleset.LocalTraffic) bool {
	n := &near{pods: pods}
	for _, a := range own {
		a = a.Unmap()
		// Link-local addresses need an interface to be of any use.
		if a.IsValid() && a.Zone() == "" && !a.IsLinkLocalUnicast() {
			n.own = append(n.own, a)
		}
	}
	slices.SortFunc(n.own, netip.Addr.Compare)
	n.own = slices.Compact(n.own)
	if b.near != nil && slices.Equal(b.near.own, n.own) && b.near.pods.Bridge == pods.Bridge &&
		b.near.pods.InterfacePrefix == pods.InterfacePrefix && slices.Equal(b.near.pods.CIDRs, pods.CIDRs) {
		return false
	}
	b.near = n
	return true
}

// bind has a place do what r says.
func (b *Backend) bind(p place, r *rule) error {
	bi := b.bindings[p]
	if bi == nil {
		bi = &binding{place: p}
		b.bindings[p] = bi
	}
	if r.frontend.Kind == ruleset.NodePort {
		bi.nodePort = r
	} else {
		bi.exact = r
	}
	return b.update(bi)
}

// unbind takes a place from a Service, unless another one is about to have it
// next.
func (b *Backend) unbind(p place, s *service, next map[slot]bool) {
	bi := b.bindings[p]
	if bi == nil {
		return
	}
	if bi.exact != nil && bi.exact.service == s && !next[slot{p, false}] {
		bi.exact = nil
	}
	if bi.nodePort != nil && bi.nodePort.service == s && !next[slot{p, true}] {
		bi.nodePort = nil
	}
	if err := b.update(bi); err != nil { // the other's, which is tried again with it
		b.config.Log.Warn("cannot listen", "address", p.at, "protocol", p.proto, "error", err)
	}
}

// update makes the socket of a place what its rules ask for.
func (b *Backend) update(bi *binding) error {
	r := bi.exact
	if r == nil {
		r = bi.nodePort
	}
	held := bi.held.Load()
	if bi.rule.Load().equal(r) && r.listens() == (bi.socket != nil) && (bi.exact == nil) == (held == nil) {
		if r == nil {
			delete(b.bindings, bi.place)
		}
		return nil
	}
	bi.rule.Store(r)
	if !r.listens() {
		if bi.socket != nil {
			bi.socket.close()
			bi.socket = nil
			b.sockets.Add(-1)
		}
	} else if err := b.listen(bi, r); err != nil {
		return err
	}
	// The socket is there before anybody can reach it, and nobody can any more when
	// it goes for good.
	switch {
	case bi.exact != nil && held == nil:
		a, err := b.hold(bi.at.Addr())
		if err != nil {
			return err
		}
		bi.held.Store(a)
	case bi.exact == nil && held != nil:
		b.release(bi.at.Addr(), held)
		bi.held.Store(nil)
	}
	if r == nil {
		delete(b.bindings, bi.place)
	}
	return nil
}

// listen opens the socket of a place, or changes whom it answers.
func (b *Backend) listen(bi *binding, r *rule) error {
	who := r.audience(bi.at.Addr())
	if bi.socket != nil {
		if who.equal(bi.heard) {
			return nil
		}
		if err := bi.socket.listenTo(who); err != nil {
			return fmt.Errorf("listen to others at %s: %w", bi.at, err)
		}
		bi.heard = who
		return nil
	}
	lc := net.ListenConfig{Control: control(bi.at.Addr(), who)}
	var err error
	if bi.proto == v1.ProtocolUDP {
		bi.socket, err = b.listenUDP(&lc, bi)
	} else {
		bi.socket, err = b.listenTCP(&lc, bi)
	}
	if err != nil {
		bi.socket = nil
		return err
	}
	b.sockets.Add(1)
	bi.heard = who
	return nil
}

// hold makes an address the node's own.
func (b *Backend) hold(a netip.Addr) (*address, error) {
	h := b.addresses[a]
	if h == nil {
		if err := b.config.Addresses.Hold(a); err != nil {
			return nil, fmt.Errorf("make %s an address of the node: %w", a, err)
		}
		h = &address{conns: map[*conn]struct{}{}}
		b.addresses[a] = h
	}
	h.uses++
	return h, nil
}

// release gives an address back when its last user does. Connections by it would
// hear nothing any more, and are cut.
func (b *Backend) release(a netip.Addr, h *address) {
	if h.uses--; h.uses > 0 {
		return
	}
	h.mu.Lock()
	h.gone = true
	for c := range h.conns {
		c.cut()
	}
	h.mu.Unlock()
	delete(b.addresses, a)
	if err := b.config.Addresses.Release(a); err != nil {
		b.config.Log.Warn("cannot give back an address", "address", a, "error", err)
	}
}

// prune gives back the addresses that an earlier process held.
func (b *Backend) prune() error {
	held, err := b.config.Addresses.Held()
	if err != nil {
		return fmt.Errorf("dataplane: the addresses of Services: %w", err)
	}
	missing := make(map[netip.Addr]bool, len(b.addresses))
	for a := range b.addresses {
		missing[a] = true
	}
	var errs []error
	for _, a := range held {
		if b.addresses[a] == nil {
			errs = append(errs, b.config.Addresses.Release(a))
		}
		delete(missing, a)
	}
	for a := range missing { // somebody took it away, or it is an interface's
		errs = append(errs, b.config.Addresses.Hold(a))
	}
	return errors.Join(errs...)
}

// Shutdown stops listening, waits until the connections have ended or ctx is done,
// cuts the rest, and gives back all addresses. It returns ctx's error if something
// had to be cut. Further calls do nothing.
func (b *Backend) Shutdown(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	for _, bi := range b.bindings {
		if bi.socket != nil {
			bi.socket.close()
			b.sockets.Add(-1)
		}
	}
	ended := make(chan struct{})
	go func() {
		b.running.Wait()
		close(ended)
	}()
	var err error
	select {
	case <-ended:
	default:
		select {
		case <-ended:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	b.cancel() // cuts every connection
	<-ended
	for a := range b.addresses {
		if e := b.config.Addresses.Release(a); e != nil {
			b.config.Log.Warn("cannot give back an address", "address", a, "error", e)
		}
	}
	clear(b.bindings)
	clear(b.addresses)
	clear(b.services)
	return err
}
