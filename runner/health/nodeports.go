package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ErrClosed is returned by [NodePorts.Apply] after [NodePorts.Close].
var ErrClosed = errors.New("health: closed")

// NodePortsConfig is what a [NodePorts] is made of.
type NodePortsConfig struct {
	// Services counts and answers; required. It must not be attached by itself too.
	Services *Services
	// Families is the address families to listen in. Nil means both.
	Families []tracker.Family
	// Listen opens a port. Nil means [net.ListenConfig.Listen]. The network is tcp4 or
	// tcp6. A listener for all addresses may accept connections of both families.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	// LocalAddrs returns the node's own addresses. It is asked where NodePorts
	// answer at some addresses only ([ruleset.Node.NodePorts4]). Nil means those of
	// the interfaces.
	LocalAddrs func() ([]netip.Addr, error)
	// Failed, if not nil, is told of a port that cannot be opened: once, until it
	// can or fails otherwise. It must return soon and must not call the NodePorts.
	Failed func(service types.NamespacedName, port uint16, err error)
	// Log gets what is opened, closed and fails. Nil discards.
	Log *slog.Logger
}

// NodePorts answers at the health-check node ports of the Services there are: at
// IPv4 addresses as [Services.Handler] does for IPv4, at IPv6 addresses as it does
// for IPv6. It is a [ruleset.Backend]. Ports are open from the Apply that brings a Service to
// the one that takes it away, or to Close; no other goroutines run than those that
// serve them. Its methods are safe for concurrent use.
type NodePorts struct {
	cfg NodePortsConfig
	log *slog.Logger

	mu     sync.Mutex
	closed bool
	addrs  []netip.Addr // those to listen at, sorted; unspecified for all of a family
	open   map[types.NamespacedName]*openPort
	failed map[types.NamespacedName]string // what Failed was told
}

// openPort is a Service's servers.
type openPort struct {
	port   uint16
	addrs  []netip.Addr
	server *http.Server
	ended  sync.WaitGroup
}

// NewNodePorts returns a NodePorts that listens nowhere yet. It panics if
// c.Services is nil.
func NewNodePorts(c NodePortsConfig) *NodePorts {
	if c.Services == nil {
		panic("health: NodePortsConfig.Services is nil")
	}
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	if c.Listen == nil {
		c.Listen = new(net.ListenConfig).Listen
	}
	if c.LocalAddrs == nil {
		c.LocalAddrs = interfaceAddrs
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &NodePorts{
		cfg: c, log: c.Log,
		open:   map[types.NamespacedName]*openPort{},
		failed: map[types.NamespacedName]string{},
	}
}

func interfaceAddrs() ([]netip.Addr, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, ip.Unmap())
			}
		}
	}
	return out, nil
}

// Apply opens and closes ports as the delta has it, as [ruleset.Backend] says. It
// returns a [*ruleset.PartialError] that names the Services of d whose port could
// not be opened, so that they are offered again; each has been told to
// NodePortsConfig.Failed. Services are counted in any case.
func (n *NodePorts) Apply(ctx context.Context, d *ruleset.Delta) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return ErrClosed
	}
	touched := n.cfg.Services.apply(d)
	if d.Full || d.Node != d.OldNode {
		addrs, err := n.listenAddrs(d.Node)
		if err != nil {
			return fmt.Errorf("addresses to answer health checks at: %w", err)
		}
		if !slices.Equal(addrs, n.addrs) {
			n.addrs = addrs
			for name := range n.open {
				touched[name] = true
			}
			for name := range n.failed {
				touched[name] = true
			}
		}
	}
	// Closing all before opening any lets a port move between Services.
	for name := range touched {
		port, ok := n.cfg.Services.port(name)
		o := n.open[name]
		if o != nil && (!ok || o.port != port || !slices.Equal(o.addrs, n.addrs)) {
			n.close(name, o)
		}
		if !ok {
			delete(n.failed, name)
		}
	}
	failed := map[types.NamespacedName]error{}
	for name := range touched {
		port, ok := n.cfg.Services.port(name)
		if !ok || n.open[name] != nil {
			continue
		}
		if err := n.listen(ctx, name, port); err != nil {
			failed[name] = err
		}
	}
	return n.partial(d, failed)
}

// partial returns the error for a delta after which some Services failed.
func (n *NodePorts) partial(d *ruleset.Delta, failed map[types.NamespacedName]error) error {
	if len(failed) == 0 {
		return nil
	}
	p := &ruleset.PartialError{Failed: map[tracker.Key]error{}}
	covered := map[types.NamespacedName]bool{}
	for i := range d.Changes {
		key := d.Changes[i].Key
		if err := failed[key.NamespacedName]; err != nil {
			p.Failed[key] = err
			covered[key.NamespacedName] = true
		}
	}
	if len(covered) == len(failed) {
		return p
	}
	// Some failed because the addresses changed, not they. If the Node is not
	// acknowledged it is offered again, and so are they.
	n.addrs = nil
	errs := make([]error, 0, len(failed))
	for name, err := range failed {
		errs = append(errs, fmt.Errorf("%v: %w", name, err))
	}
	return errors.Join(errs...)
}

// listenAddrs returns the addresses to listen at, sorted.
func (n *NodePorts) listenAddrs(node *ruleset.Node) ([]netip.Addr, error) {
	var out, local []netip.Addr
	for _, f := range n.cfg.Families {
		at := node.NodePorts(f)
		if at.All {
			any := netip.IPv4Unspecified()
			if f == tracker.IPv6 {
				any = netip.IPv6Unspecified()
			}
			out = append(out, any)
			continue
		}
		if local == nil {
			var err error
			if local, err = n.cfg.LocalAddrs(); err != nil {
				return nil, err
			}
		}
		for _, a := range local {
			if tracker.FamilyOf(a) == f && !a.IsLinkLocalUnicast() && at.Allows(a) {
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// listen opens a Service's port at every address. At some but not all of them is
// better than at none, but an error all the same.
func (n *NodePorts) listen(ctx context.Context, name types.NamespacedName, port uint16) error {
	o := &openPort{port: port, addrs: n.addrs, server: &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n.cfg.Services.serve(w, name, askedIn(r.Context()))
		}),
		BaseContext: listenerContext,
		// A health check is a line; who sends it slowly is no load balancer.
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(n.log.Handler(), slog.LevelDebug),
	}}
	var errs []error
	opened := 0
	for _, a := range n.addrs {
		network := "tcp4"
		if a.Is6() {
			network = "tcp6"
		}
		l, err := n.cfg.Listen(ctx, network, netip.AddrPortFrom(a, port).String())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		opened++
		o.ended.Go(func() { _ = o.server.Serve(&listener{l, a}) }) // ends with the server
	}
	err := errors.Join(errs...)
	if err == nil {
		delete(n.failed, name)
		n.log.Debug("answering health checks", "service", name, "port", port)
		n.open[name] = o
		return nil
	}
	if opened > 0 {
		// Not in n.open with these addresses, the next Apply tries the rest: keep what
		// is open until then under addresses that are not the wanted ones.
		o.addrs = nil
		n.open[name] = o
	}
	if n.failed[name] != err.Error() {
		n.failed[name] = err.Error()
		n.log.Warn("health checks cannot be answered", "service", name, "port", port, "error", err)
		if n.cfg.Failed != nil {
			n.cfg.Failed(name, port, err)
		}
	}
	return err
}

// listener is a listener and the address that was asked for.
type listener struct {
	net.Listener
	at netip.Addr
}

// listenerKey is the key under which a request's context has its listener's at.
type listenerKey struct{}

func listenerContext(l net.Listener) context.Context {
	return context.WithValue(context.Background(), listenerKey{}, l.(*listener).at)
}

// askedIn returns the family in which a request with this context came in: that of
// the listener's address. If the listener is at all addresses, which may be those
// of both families, it is that of the address that the client connected to.
func askedIn(ctx context.Context) tracker.Family {
	at, _ := ctx.Value(listenerKey{}).(netip.Addr)
	if local, ok := ctx.Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && at.IsUnspecified() {
		if f := tracker.FamilyOf(local.AddrPort().Addr()); f != 0 {
			return f
		}
	}
	return tracker.FamilyOf(at)
}

// close closes a Service's port at once. Answers take no time, so that there is no
// point in waiting for them.
func (n *NodePorts) close(name types.NamespacedName, o *openPort) {
	delete(n.open, name)
	o.server.Close()
	o.ended.Wait()
	n.log.Debug("no longer answering health checks", "service", name, "port", o.port)
}

// Close shuts all servers down: no new connection is accepted, answers under way
// are waited for until ctx ends, and then cut off. No goroutine is left behind.
// Apply returns [ErrClosed] afterwards.
func (n *NodePorts) Close(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	var wg sync.WaitGroup
	errs := make(chan error, len(n.open))
	for name, o := range n.open {
		delete(n.open, name)
		wg.Go(func() {
			if err := o.server.Shutdown(ctx); err != nil {
				o.server.Close()
				errs <- err
			}
			o.ended.Wait()
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}
