package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/fairshare"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// place is the address of a socket.
type place struct {
	at    netip.AddrPort
	proto v1.Protocol
}

// binding is a place that a Service uses.
type binding struct {
	place
	// rules holds the rule of a frontend with the place's address, and that of a NodePort, or nil. A node's own
	// address may also be a Service's external IP, which takes precedence over a NodePort.
	rules [2]*rule
	// rule is the effective rule. The socket's goroutines read it.
	rule   atomic.Pointer[rule]
	socket socket // nil if no socket is needed, or it could not be opened
	// touched means that the current Apply changed a rule.
	touched bool
}

// socket is a listening socket. Accepted connections continue after Close.
type socket interface {
	syscall.Conn
	io.Closer
}

// Backend is a data plane in userspace, a [ruleset.Backend]. [New] creates it, and
// [Backend.Shutdown] ends it. Its methods are safe for concurrent use.
type Backend struct {
	config Config
	// complaints receives Services that cannot be served.
	complaints *complaint.Log

	// ctx ends all connections and sessions.
	ctx    context.Context
	cancel context.CancelFunc
	// running counts the goroutines of sockets, connections and sessions.
	running sync.WaitGroup

	// listening has the places with a socket as keys.
	listening sync.Map
	sessions  sessions

	connectionsMu sync.Mutex
	connections   *fairshare.Table[*conn]

	// mu is held by Apply and Shutdown.
	mu       sync.Mutex
	closed   bool
	internal *internalTraffic
	services map[tracker.Key]*service
	bindings map[place]*binding
	// addresses records which places need each held address.
	addresses driver.Ledger[place, netip.Addr]
}

// Listens reports whether the Backend has a listening socket at an address and port, for
// [v1.ProtocolTCP] or [v1.ProtocolUDP].
func (b *Backend) Listens(at netip.AddrPort, protocol v1.Protocol) bool {
	_, ok := b.listening.Load(place{netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), protocol})
	return ok
}

// Sockets returns the number of listening sockets in an address family.
func (b *Backend) Sockets(f tracker.Family) int {
	n := 0
	for p := range b.listening.Range {
		if tracker.FamilyOf(p.(place).at.Addr()) == f {
			n++
		}
	}
	return n
}

// New returns a Backend without sockets. It starts no goroutine. Apply opens listening sockets on the
// thread that calls it, and so in that thread's network namespace.
func New(c Config) *Backend {
	c = c.complete()
	ctx, cancel := context.WithCancel(context.Background())
	b := &Backend{
		config: c, complaints: complaint.NewLog(c.Log), ctx: ctx, cancel: cancel,
		services: map[tracker.Key]*service{},
		bindings: map[place]*binding{},
	}
	b.connections, b.sessions.all = fairshare.New[*conn](c.MaxConnections), fairshare.New[*session](c.MaxSessions)
	return b
}

// Apply implements [ruleset.Backend]: it opens, changes and closes sockets. If a Service's
// sockets cannot be opened, for example because another program uses the port, Apply returns
// a [*ruleset.PartialError] that names the Service. Its other sockets stay open.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return ErrClosed
	}
	if !d.Full && (d.Node != d.OldNode || b.internal == nil) {
		return ruleset.ErrNeedFull // the sockets of all Services depend on the node
	}
	if d.Full {
		if err := b.look(d.Node.LocalTraffic); err != nil {
			return err
		}
	}
	changed := b.changed(d)
	// All rules are known before a socket changes: a place that another Service takes over stays open.
	var touched []*binding
	touch := func(p place) *binding {
		bi := b.bindings[p]
		if bi == nil {
			bi = &binding{place: p}
			b.bindings[p] = bi
		}
		if !bi.touched {
			bi.touched, touched = true, append(touched, bi)
		}
		return bi
	}
	for _, s := range changed {
		for _, r := range s.rules {
			if at := &touch(r.place).rules[r.rank()]; *at == r {
				*at = nil
			}
		}
	}
	for _, s := range changed {
		s.balancer.set(methodOf(s.next, b.config.Algorithm(s.next), d.Node))
		s.set(s.next)
		s.rules = s.nextRules
		for _, r := range s.rules {
			touch(r.place).rules[r.rank()] = r
		}
	}
	failed := map[tracker.Key]error{}
	for _, listens := range []bool{false, true} { // close sockets before others are opened
		for _, bi := range touched {
			if !bi.touched || cmp.Or(bi.rules[0], bi.rules[1]).listens() != listens {
				continue
			}
			bi.touched = false
			r, err := b.update(bi)
			switch {
			case err == nil:
			case r.service.next != nil:
				failed[r.service.key] = errors.Join(failed[r.service.key], err)
			default: // its external IP is now a NodePort alone
				b.complain(r, "cannot listen", err)
			}
		}
	}
	for _, s := range changed {
		if len(s.rules) == 0 {
			delete(b.services, s.key)
		}
		s.next, s.nextRules = nil, nil
	}
	b.release()
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// changed returns the Services of a delta. Their sockets are not entries of a [driver.Driver]: a socket is open
// before its address is reachable, Services that have sockets and then the oldest come first, and an
// address of the node may have a socket for a NodePort and an external IP together.
func (b *Backend) changed(d *ruleset.Delta) (out []*service) {
	seen := map[*service]bool{}
	add := func(k tracker.Key, now *ruleset.Port) {
		s := b.services[k]
		if s == nil {
			s = newService(k, b.config.Drain)
		}
		var rules []*rule
		if now != nil {
			rules = b.rules(s, now, d.Node)
		}
		if len(rules) != 0 && k.Protocol != v1.ProtocolTCP && k.Protocol != v1.ProtocolUDP {
			// One line for all ports of a Service.
			o := complaint.Object{Kind: "service", Namespace: k.Namespace, Name: k.Name}
			b.complaints.Write(slog.LevelWarn, o, "ports are not served: only TCP and UDP are supported", "protocol", complaint.Value(k.Protocol))
			rules = nil
		}
		if len(rules) == 0 {
			if b.services[k] == nil {
				return
			}
			gone := *s.now.Load() // with its pools, for connections that were accepted before
			gone.Endpoints = nil
			now = &gone
		}
		b.services[k] = s
		s.next, s.nextRules, seen[s] = now, rules, true
		out = append(out, s)
	}
	for i := range d.Changes {
		add(d.Changes[i].Key, d.Changes[i].New)
	}
	if d.Full {
		for k, s := range b.services {
			if !seen[s] {
				add(k, nil)
			}
		}
	}
	slices.SortFunc(out, func(a, b *service) int {
		if x, y := a.now.Load() != nil, b.now.Load() != nil; x != y {
			if x {
				return -1
			}
			return 1
		}
		return cmp.Or(a.next.Spec.CompareAge(b.next.Spec), a.key.Compare(b.key))
	})
	return out
}

// rules returns the rules of a Service's frontends.
func (b *Backend) rules(s *service, svc *ruleset.Port, n *ruleset.Node) (out []*rule) {
	add := func(f ruleset.Frontend, a netip.Addr) {
		at := netip.AddrPortFrom(a, f.Port)
		if b.config.Serves(&f, svc.Key.Protocol, at) {
			out = append(out, &rule{place{at, svc.Key.Protocol}, s, f, b.internal})
		}
	}
	for _, f := range svc.Frontends {
		if f.Kind != ruleset.KindNodePort {
			add(f, f.Addr)
			continue
		}
		ports := n.NodePorts(svc.Key.Family)
		for _, a := range b.internal.own {
			if tracker.FamilyOf(a) == svc.Key.Family && (ports.Allows(a) || ports.AllowsLoopback(a)) {
				add(f, a)
			}
		}
	}
	return out
}

// Limits returns the zero Limits, which means no limit.
func (*Backend) Limits(tracker.Family) ruleset.Limits { return ruleset.Limits{} }

// Watch calls drifted with each error of Check, at the interval, until ctx ends or b is
// closed.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	return dataplane.Watch(ctx, interval, b.Check, drifted)
}

// Check returns an error that wraps [ruleset.ErrNeedFull] if the node's own addresses have
// changed since the last full delta, or if a held address is missing. A full delta repairs
// both. It returns [os.ErrClosed] if b is closed.
func (b *Backend) Check(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return os.ErrClosed
	case b.internal == nil:
		return nil
	}
	own, held, err := b.addressesOfNode()
	if err != nil {
		return err
	}
	if !slices.Equal(own, b.internal.own) {
		return fmt.Errorf("dataplane: the node's addresses changed: %w", ruleset.ErrNeedFull)
	}
	for a := range b.addresses.All() {
		if !held[a] && !slices.Contains(own, a) {
			return fmt.Errorf("dataplane: address %s is missing: %w", a, ruleset.ErrNeedFull)
		}
	}
	return nil
}

// addressesOfNode returns the node's own addresses that a socket can use, sorted, and the held addresses.
func (b *Backend) addressesOfNode() (own []netip.Addr, held map[netip.Addr]bool, err error) {
	var list []netip.Addr
	if own, err = b.config.Addresses.Own(); err == nil {
		list, err = b.config.Addresses.Held()
	}
	if err != nil {
		return nil, nil, fmt.Errorf("dataplane: %w", err)
	}
	held = make(map[netip.Addr]bool, len(list))
	for _, a := range list {
		held[a] = true
	}
	return usable(own), held, nil
}

// usable returns the addresses that a socket can use, sorted.
func usable(own []netip.Addr) (out []netip.Addr) {
	for _, a := range own {
		a = a.Unmap()
		// Link-local addresses cannot be used without an interface.
		if a.IsValid() && a.Zone() == "" && !a.IsLinkLocalUnicast() {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// look stores the node's own addresses and the ranges of pods, and which addresses are held. If own addresses and pods
// are as before, rules stay equal.
func (b *Backend) look(pods ruleset.LocalTraffic) error {
	own, held, err := b.addressesOfNode()
	if err != nil {
		return err
	}
	if n := b.internal; n == nil || !slices.Equal(n.own, own) || !slices.Equal(n.pods.CIDRs, pods.CIDRs) {
		b.internal = &internalTraffic{pods: pods, own: own}
	}
	for a := range b.addresses.All() {
		if !held[a] { // another process removed it, or an interface has it
			b.addresses.Removed(a)
		}
	}
	for a := range held {
		b.addresses.Installed(a)
	}
	return nil
}

// update opens, changes or closes the socket of a place according to its rules. It returns the effective one.
func (b *Backend) update(bi *binding) (*rule, error) {
	r := cmp.Or(bi.rules[0], bi.rules[1])
	if r == nil {
		delete(b.bindings, bi.place)
	}
	if !bi.rule.Load().equal(r) || r.listens() != (bi.socket != nil) {
		bi.rule.Store(r)
		if !r.listens() {
			b.unlisten(bi)
		} else if err := b.listen(bi, r); errors.Is(err, syscall.EADDRINUSE) && r.frontend.Kind == ruleset.KindClusterIP && slices.Contains(b.internal.own, bi.at.Addr()) {
			// Its program, such as node-local-dns, gets the connections until the address leaves the node.
			b.complain(r, "cluster IP is the node's own address, and left to the program that listens there", err)
		} else if err != nil {
			return r, err
		}
	}
	// The socket is open before the address is reachable.
	a := bi.at.Addr()
	if bi.rules[0] == nil {
		b.addresses.Release(bi.place, a)
	} else if b.addresses.Claim(bi.place, a) {
		if err := b.config.Addresses.Hold(a); err != nil {
			return r, fmt.Errorf("cannot add address %s to the node: %w", a, err)
		}
		b.addresses.Installed(a)
	}
	return r, nil
}

// listen opens the socket of a place, or changes its audience.
func (b *Backend) listen(bi *binding, r *rule) error {
	if bi.socket != nil {
		if err := setAudience(bi.socket, bi.at.Addr(), r.audience()); err != nil {
			b.unlisten(bi) // a retry opens it again
			return fmt.Errorf("cannot change the socket filter of %s: %w", bi.at, err)
		}
		return nil
	}
	if !b.config.Sockets.Take() {
		return fmt.Errorf("cannot listen at %s: %w", bi.at, ErrTooManySockets)
	}
	lc := net.ListenConfig{Control: control(bi.at.Addr(), r.audience())}
	// Package net would accept Multipath TCP, which costs time and which no kernel data plane
	// translates.
	lc.SetMultipathTCP(false)
	var err error
	if bi.proto == v1.ProtocolUDP {
		bi.socket, err = b.listenUDP(&lc, bi)
	} else {
		bi.socket, err = b.listenTCP(&lc, bi)
	}
	if err != nil {
		bi.socket = nil
		b.config.Sockets.Give()
		return err
	}
	b.listening.Store(bi.place, nil)
	return nil
}

// unlisten closes the socket of a place, if it has one.
func (b *Backend) unlisten(bi *binding) {
	if bi.socket != nil {
		bi.socket.Close()
		bi.socket = nil
		b.listening.Delete(bi.place)
		b.config.Sockets.Give()
	}
}

func (b *Backend) complain(r *rule, message string, err error) {
	k := r.service.key
	b.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), message, "error", err)
}

// release removes the addresses without bindings from the node, including those of an earlier process. It resets the
// connections through them, which could not receive any more. A connection that is not in the table yet finds no rule.
func (b *Backend) release() {
	unused := map[netip.Addr]bool{}
	for a := range b.addresses.Unused() {
		unused[a] = true
	}
	if len(unused) == 0 {
		return
	}
	b.connectionsMu.Lock()
	for c := range b.connections.All() {
		if a := c.at.Addr(); unused[a] && !slices.Contains(b.internal.own, a) {
			reset(c.client) // while the address is there
			c.cut()
		}
	}
	b.connectionsMu.Unlock()
	for a := range unused {
		b.addresses.Removed(a)
		if err := b.config.Addresses.Release(a); err != nil {
			b.complaints.Write(slog.LevelWarn, complaint.Object{Kind: "address", Name: a.String()}, "cannot release address", "error", err)
		}
	}
}

// Shutdown closes the listening sockets, waits until all connections have ended or ctx is
// done, resets the remaining connections, and releases all addresses. It returns ctx's error
// if ctx was done first. Further calls do nothing.
func (b *Backend) Shutdown(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	for _, bi := range b.bindings {
		b.unlisten(bi)
	}
	stop := context.AfterFunc(ctx, b.cancel) // resets every connection
	b.running.Wait()
	var err error
	if !stop() {
		err = ctx.Err()
	}
	b.cancel()
	for p := range b.bindings {
		b.addresses.Release(p, p.at.Addr())
	}
	b.release()
	clear(b.bindings)
	clear(b.services)
	return err
}

// Close resets all connections and releases all addresses. It returns nil.
func (b *Backend) Close() error {
	now, cancel := context.WithCancel(context.Background())
	cancel()
	_ = b.Shutdown(now)
	return nil
}

// Traffic implements [dataplane.TrafficReader]. It returns the numbers of TCP connections and
// UDP sessions of each Service port in this process. Connections that no endpoint accepted do
// not count.
func (b *Backend) Traffic(ctx context.Context) (*dataplane.Traffic, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, ErrClosed
	}
	out := &dataplane.Traffic{Known: dataplane.CountsConnections, Services: map[tracker.Key]dataplane.Counters{}}
	for k, s := range b.services {
		if n := s.made.Load(); n != 0 {
			out.Services[k] = dataplane.Counters{Connections: n}
		}
	}
	return out, nil
}
