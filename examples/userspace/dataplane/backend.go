package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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
	// rule is the effective rule. The socket's goroutines read it.
	rule   atomic.Pointer[rule]
	socket socket // nil if no socket is needed, or it could not be opened
	heard  audience
}

type socket interface {
	listenTo(audience) error
	// close closes the socket. Accepted connections continue if possible.
	close()
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
	mu        sync.Mutex
	closed    bool
	internal  *internalTraffic
	services  map[tracker.Key]*service
	bindings  map[place]*binding
	addresses map[netip.Addr]bool // those held
}

// Listens reports whether the Backend has a listening socket at an address and port, for
// [v1.ProtocolTCP] or [v1.ProtocolUDP].
func (b *Backend) Listens(at netip.AddrPort, protocol v1.Protocol) bool {
	_, ok := b.listening.Load(place{netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), protocol})
	return ok
}

// Sockets returns the number of listening sockets in an address family.
func (b *Backend) Sockets(f tracker.Family) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for p, bi := range b.bindings {
		if bi.socket != nil && tracker.FamilyOf(p.at.Addr()) == f {
			n++
		}
	}
	return n
}

// New returns a Backend without sockets. Its error wraps [ErrConfig].
//
// New starts no goroutine. Apply opens listening sockets on the thread that calls it, and so
// in that thread's network namespace.
func New(c Config) (*Backend, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	b := &Backend{
		config: c, complaints: complaint.NewLog(c.Log), ctx: ctx, cancel: cancel,
		services:  map[tracker.Key]*service{},
		bindings:  map[place]*binding{},
		addresses: map[netip.Addr]bool{},
	}
	b.connections, b.sessions.all = fairshare.New[*conn](c.MaxConnections), fairshare.New[*session](c.MaxSessions)
	return b, nil
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
		own, err := b.config.Addresses.Own()
		if err != nil {
			return fmt.Errorf("dataplane: cannot list the node's addresses: %w", err)
		}
		b.look(own, d.Node.LocalTraffic)
	}
	named := make(map[tracker.Key]bool, len(d.Changes))
	var removed []*service
	for i := range d.Changes {
		c := &d.Changes[i]
		named[c.Key] = true
		if s := b.change(c, d.Node); s != nil {
			removed = append(removed, s)
		}
	}
	for k, s := range b.services {
		if d.Full && !named[k] {
			removed = append(removed, s)
			delete(b.services, k)
		}
	}
	failed := b.listenAll(named)
	for _, s := range removed {
		s.remove()
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

// change stores the new version of a Service. It returns the Service if it has no frontends any more.
func (b *Backend) change(c *ruleset.Change, n *ruleset.Node) (removed *service) {
	k, s := c.Key, b.services[c.Key]
	var frontends []bound
	if c.New != nil {
		frontends = b.places(c.New, n)
	}
	if len(frontends) != 0 && k.Protocol != v1.ProtocolTCP && k.Protocol != v1.ProtocolUDP {
		// One line for all ports of a Service.
		o := complaint.Object{Kind: "service", Namespace: k.Namespace, Name: k.Name}
		b.complaints.Write(slog.LevelWarn, o, "ports are not served: only TCP and UDP are supported", "protocol", complaint.Value(k.Protocol))
		frontends = nil
	}
	if len(frontends) == 0 {
		delete(b.services, k)
		return s
	}
	m := methodOf(c.New, b.config.Algorithm(c.New), n)
	if s == nil {
		s = newService(c.New, m, b.config.Drain)
		b.services[k] = s
	} else {
		s.set(c.New, m)
	}
	s.frontends = frontends
	return nil
}

// listenAll gives all places their rules and sockets, and the node the addresses of Services. It returns the
// errors of the named Services, and logs others. Sockets are not entries of a [driver.Driver]: a socket is open
// before its address is reachable, the oldest Service comes first, and an address of the node may have a socket
// for a NodePort and an external IP together.
func (b *Backend) listenAll(named map[tracker.Key]bool) map[tracker.Key]error {
	// All rules are known before a socket changes: a place that another Service takes over stays open.
	rules, needed := map[place]*rule{}, map[netip.Addr]bool{}
	for _, s := range b.services {
		for _, f := range s.frontends {
			// A node's own address may also be a Service's external IP, which takes precedence over a NodePort.
			if nodePort := f.frontend.Kind == ruleset.KindNodePort; rules[f.place] == nil || !nodePort {
				rules[f.place] = &rule{s, f.frontend, b.internal}
				needed[f.at.Addr()] = needed[f.at.Addr()] || !nodePort
			}
		}
	}
	for p, bi := range b.bindings {
		if rules[p] == nil {
			b.close(bi)
			bi.rule.Store(nil)
			delete(b.bindings, p)
		}
	}
	failed := map[tracker.Key]error{}
	update := func(p place) {
		err := b.update(b.bindings[p], rules[p])
		if err == nil {
			return
		}
		if key := rules[p].service.now.Load().Key; named[key] {
			failed[key] = errors.Join(failed[key], err)
		} else { // its external IP is now a NodePort alone
			b.complaints.Write(slog.LevelWarn, complaint.Port(key.Namespace, key.Name, key.String()), "cannot listen", "error", err)
		}
	}
	var closed []place
	for p := range rules {
		if bi := b.bindings[p]; bi == nil || bi.socket == nil {
			b.bindings[p] = cmp.Or(bi, &binding{place: p})
			closed = append(closed, p)
		} else {
			update(p)
		}
	}
	slices.SortFunc(closed, func(x, y place) int {
		s, t := rules[x].service.now.Load(), rules[y].service.now.Load()
		return cmp.Or(s.Spec.CompareAge(t.Spec), s.Key.Compare(t.Key))
	})
	for _, p := range closed {
		update(p)
	}
	b.release(needed)
	return failed
}

// bound is a frontend at one place.
type bound struct {
	place
	frontend ruleset.Frontend
}

// places returns the places of a Service's frontends.
func (b *Backend) places(svc *ruleset.Port, n *ruleset.Node) []bound {
	out := make([]bound, 0, len(svc.Frontends))
	add := func(f ruleset.Frontend, a netip.Addr) {
		at := netip.AddrPortFrom(a, f.Port)
		if b.config.Serves(&f, svc.Key.Protocol, at) {
			out = append(out, bound{place{at, svc.Key.Protocol}, f})
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
	own, err := b.config.Addresses.Own()
	if err != nil {
		return fmt.Errorf("dataplane: cannot list the node's addresses: %w", err)
	}
	if own = usable(own); !slices.Equal(own, b.internal.own) {
		return fmt.Errorf("dataplane: the node's addresses changed: %w", ruleset.ErrNeedFull)
	}
	held, err := b.config.Addresses.Held()
	if err != nil {
		return fmt.Errorf("dataplane: cannot list the held addresses: %w", err)
	}
	for a := range b.addresses {
		if !slices.Contains(held, a) && !slices.Contains(own, a) {
			return fmt.Errorf("dataplane: address %s is missing: %w", a, ruleset.ErrNeedFull)
		}
	}
	return nil
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

// look stores the node's own addresses and the rules that identify pods. It does nothing if they
// are as before, so that rules stay equal.
func (b *Backend) look(own []netip.Addr, pods ruleset.LocalTraffic) {
	n := &internalTraffic{pods: pods, own: usable(own)}
	if b.internal != nil && slices.Equal(b.internal.own, n.own) && b.internal.pods.Bridge == pods.Bridge &&
		b.internal.pods.InterfacePrefix == pods.InterfacePrefix && slices.Equal(b.internal.pods.CIDRs, pods.CIDRs) {
		return
	}
	b.internal = n
}

// update sets the rule of a place, and opens, changes or closes its socket.
func (b *Backend) update(bi *binding, r *rule) error {
	a, nodePort := bi.at.Addr(), r.frontend.Kind == ruleset.KindNodePort
	if bi.rule.Load().equal(r) && r.listens() == (bi.socket != nil) && (nodePort || b.addresses[a]) {
		return nil
	}
	bi.rule.Store(r)
	if !r.listens() {
		b.close(bi)
	} else if err := b.listen(bi, r); errors.Is(err, syscall.EADDRINUSE) && r.frontend.Kind == ruleset.KindClusterIP && slices.Contains(b.internal.own, a) {
		// Its program, such as node-local-dns, gets the connections until the address leaves the node.
		k := r.service.now.Load().Key
		b.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "cluster IP is the node's own address, and left to the program that listens there", "error", err)
	} else if err != nil {
		return err
	}
	// The socket is open before the address is reachable.
	if !nodePort && !b.addresses[a] {
		if err := b.config.Addresses.Hold(a); err != nil {
			return fmt.Errorf("cannot add address %s to the node: %w", a, err)
		}
		b.addresses[a] = true
	}
	return nil
}

// listen opens the socket of a place, or changes its audience.
func (b *Backend) listen(bi *binding, r *rule) error {
	who := r.audience(bi.at.Addr())
	if bi.socket != nil {
		if who.equal(bi.heard) {
			return nil
		}
		if err := bi.socket.listenTo(who); err != nil {
			return fmt.Errorf("cannot change the socket filter of %s: %w", bi.at, err)
		}
		bi.heard = who
		return nil
	}
	if !b.config.Sockets.Take() {
		return fmt.Errorf("cannot listen at %s: %w", bi.at, ErrTooManySockets)
	}
	lc := net.ListenConfig{Control: control(bi.at.Addr(), who)}
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
	bi.heard = who
	return nil
}

// close closes the socket of a place, if there is one.
func (b *Backend) close(bi *binding) {
	if bi.socket != nil {
		bi.socket.close()
		bi.socket = nil
		b.listening.Delete(bi.place)
		b.config.Sockets.Give()
	}
}

// release removes the addresses that are not needed from the node. It resets the connections through
// them, which could not receive any more. A connection that is not in the table yet finds no rule.
func (b *Backend) release(needed map[netip.Addr]bool) {
	gone := maps.Clone(b.addresses)
	maps.DeleteFunc(gone, func(a netip.Addr, _ bool) bool { return needed[a] })
	if len(gone) == 0 {
		return
	}
	b.connectionsMu.Lock()
	for c := range b.connections.All() {
		if a := c.at.Addr(); gone[a] && !slices.Contains(b.internal.own, a) {
			c.cut()
		}
	}
	b.connectionsMu.Unlock()
	for a := range gone {
		delete(b.addresses, a)
		if err := b.config.Addresses.Release(a); err != nil {
			b.config.Log.Warn("cannot release address", "address", a, "error", err)
		}
	}
}

// prune releases the addresses that an earlier process held, and restores missing ones.
func (b *Backend) prune() error {
	held, err := b.config.Addresses.Held()
	if err != nil {
		return fmt.Errorf("dataplane: cannot list the held addresses: %w", err)
	}
	missing := maps.Clone(b.addresses)
	var errs []error
	for _, a := range held {
		if !b.addresses[a] {
			if err := b.config.Addresses.Release(a); err != nil { // no Service needs it
				b.complaints.Write(slog.LevelWarn, complaint.Object{Kind: "address", Name: a.String()}, "cannot release an address of an earlier process", "error", err)
			}
		}
		delete(missing, a)
	}
	for a := range missing { // another process removed it, or an interface has it
		errs = append(errs, b.config.Addresses.Hold(a))
	}
	return errors.Join(errs...)
}

// Shutdown closes the listening sockets, waits until all connections have ended or ctx is
// done, resets the remaining connections, and releases all addresses. It returns ctx's error
// if it reset a connection. Further calls do nothing.
func (b *Backend) Shutdown(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	for _, bi := range b.bindings {
		b.close(bi)
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
	b.cancel() // resets every connection
	<-ended
	b.release(nil)
	clear(b.bindings)
	clear(b.services)
	return err
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
