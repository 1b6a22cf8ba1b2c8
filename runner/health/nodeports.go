package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

var errClosed = fmt.Errorf("health: node ports: %w", os.ErrClosed)

// NodePortsConfig configures a [NodePorts].
type NodePortsConfig struct {
	// Services counts the endpoints and is required. It must not be attached to an Engine itself.
	Services *Services
	// Families lists the address families to listen in. Nil means both.
	Families []tracker.Family
	// Listen opens a port. Nil means [net.ListenConfig.Listen]. network is tcp4 or
	// tcp6. A listener for all addresses may accept connections of both families.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	// LocalAddrs returns the node's own addresses. NodePorts calls it if the NodePort addresses are restricted
	// ([ruleset.Node].NodePorts4), in full deltas, when the Node changes, and in [NodePorts.Refresh]. Nil means the
	// addresses of the interfaces.
	LocalAddrs func() ([]netip.Addr, error)
	// Connections is the maximum number of connections to all ports together. A new one beyond that replaces another:
	// of the namespace that has most, of its Service and of that Service's client that have most. 0 means 512.
	Connections int
	// Failed, if not nil, is called at a bounded rate when a port cannot be opened, and again only if the port fails
	// with another error. Failed must return quickly and must not call the NodePorts.
	Failed func(service types.NamespacedName, port uint16, err error)
	// Log receives opened, closed and failed ports. Nil discards them.
	Log *slog.Logger
}

// NodePorts serves the health-check node ports of all Services. At IPv4 addresses it responds as [Services.Handler]
// does for IPv4, at IPv6 addresses as for IPv6. It is a [ruleset.Backend]. A port is open from the Apply that adds
// its Service until the Apply that removes it, or until Close. The timeouts of [NewServer] apply. The methods are
// safe for concurrent use.
//
// [NewNodePorts] makes one; the zero value must not be used.
type NodePorts struct {
	cfg        NodePortsConfig
	log        *slog.Logger
	complaints *complaint.Log
	// conns bounds the connections of all ports together.
	conns *conns

	mu     sync.Mutex
	closed bool
	node   *ruleset.Node // of the last Apply
	addrs  []netip.Addr  // listen addresses, sorted; unspecified means all of a family
	again  bool          // the last Refresh could not open all ports
	open   map[types.NamespacedName]*openPort
	failed map[types.NamespacedName]string // the last error reported by Failed
}

type openPort struct {
	port   uint16
	addrs  []netip.Addr
	server *http.Server
	ended  sync.WaitGroup
}

// NewNodePorts returns a NodePorts without open ports. It panics if c.Services is
// nil.
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
		cfg: c, log: c.Log, complaints: complaint.NewLog(c.Log), conns: newConns(c.Connections),
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

// Apply opens and closes ports for a delta, as [ruleset.Backend] specifies. If some ports cannot be opened, it
// reports them to NodePortsConfig.Failed and returns a [*ruleset.PartialError] with the Services of d concerned. The
// endpoints are counted in any case.
func (n *NodePorts) Apply(ctx context.Context, d *ruleset.Delta) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return errClosed
	}
	touched := n.cfg.Services.apply(d)
	if d.Full || d.Node != d.OldNode {
		if err := n.readAddrs(d.Node, touched); err != nil {
			return err
		}
	}
	return n.partial(d, n.rebind(ctx, touched))
}

// Refresh reads the node's addresses again if the NodePort addresses are restricted, and opens the ports at new
// addresses. Call it after the addresses of the node's interfaces changed, or regularly, and again if it fails.
func (n *NodePorts) Refresh(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
		return errClosed
	case n.node == nil || n.node.NodePorts4.All && n.node.NodePorts6.All:
		return nil
	}
	touched := map[types.NamespacedName]bool{}
	if err := n.readAddrs(n.node, touched); err != nil {
		return err
	}
	if n.again {
		for name := range n.failed {
			touched[name] = true
		}
	}
	failed := n.rebind(ctx, touched)
	n.again = len(failed) != 0
	return join(failed)
}

// readAddrs reads the addresses to listen on. If they changed, it adds the Services with ports to
// touched.
func (n *NodePorts) readAddrs(node *ruleset.Node, touched map[types.NamespacedName]bool) error {
	addrs, err := n.listenAddrs(node)
	if err != nil {
		return fmt.Errorf("cannot list the addresses for health checks: %w", err)
	}
	if n.node = node; slices.Equal(addrs, n.addrs) {
		return nil
	}
	n.addrs = addrs
	for name := range n.open {
		touched[name] = true
	}
	for name := range n.failed {
		touched[name] = true
	}
	return nil
}

func (n *NodePorts) rebind(ctx context.Context, touched map[types.NamespacedName]bool) map[types.NamespacedName]error {
	// Close all ports before opening any, so that a port can move between Services.
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
	for _, name := range n.cfg.Services.byAge(touched) {
		port, ok := n.cfg.Services.port(name)
		if !ok || n.open[name] != nil {
			continue
		}
		if err := n.listen(ctx, name, port); err != nil {
			failed[name] = err
		}
	}
	return failed
}

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
	// Some failed because the addresses changed, although d does not contain them. With a plain error the Engine
	// offers the Node again, and Apply retries them.
	n.addrs = nil
	return join(failed)
}

func join(failed map[types.NamespacedName]error) error {
	errs := make([]error, 0, len(failed))
	for name, err := range failed {
		errs = append(errs, fmt.Errorf("%v: %w", name, err))
	}
	return errors.Join(errs...)
}

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

// listen opens a Service's port at every address. If it fails at some addresses, it
// keeps the others open and returns an error.
func (n *NodePorts) listen(ctx context.Context, name types.NamespacedName, port uint16) error {
	o := &openPort{port: port, addrs: n.addrs, server: newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.cfg.Services.serve(w, name, requestFamily(r.Context()))
	}), n.conns, name, n.log)}
	o.server.BaseContext = listenerContext
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
		o.ended.Go(func() { _ = o.server.Serve(&listener{l, a}) }) // returns when the server closes
	}
	err := errors.Join(errs...)
	if err == nil {
		delete(n.failed, name)
		n.log.Debug("opened a health-check node port", "service", name, "port", port)
		n.open[name] = o
		return nil
	}
	if opened > 0 {
		// Record no addresses, so that the next Apply sees a difference and tries
		// again. The open listeners serve until then.
		o.addrs = nil
		n.open[name] = o
	}
	if n.failed[name] != err.Error() {
		n.failed[name] = err.Error()
		about := complaint.Object{Kind: "service", Namespace: name.Namespace, Name: name.Name}
		if n.complaints.Write(slog.LevelWarn, about, "cannot open a health-check node port", "port", port, "error", err) && n.cfg.Failed != nil {
			n.cfg.Failed(name, port, err)
		}
	}
	return err
}

// listener is a listener with the address that was requested.
type listener struct {
	net.Listener
	at netip.Addr
}

// listenerKey is the context key of the requested address.
type listenerKey struct{}

func listenerContext(l net.Listener) context.Context {
	return context.WithValue(context.Background(), listenerKey{}, l.(*listener).at)
}

// requestFamily returns the family in which the request with this context arrived: that of the listener's address or,
// at a listener for all addresses, of the address that the client connected to.
func requestFamily(ctx context.Context) tracker.Family {
	at, _ := ctx.Value(listenerKey{}).(netip.Addr)
	if local, ok := ctx.Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && at.IsUnspecified() {
		if f := tracker.FamilyOf(local.AddrPort().Addr()); f != 0 {
			return f
		}
	}
	return tracker.FamilyOf(at)
}

// close closes a Service's port immediately. It does not wait for responses, which are
// short.
func (n *NodePorts) close(name types.NamespacedName, o *openPort) {
	delete(n.open, name)
	o.server.Close()
	o.ended.Wait()
	n.log.Debug("closed a health-check node port", "service", name, "port", o.port)
}

// Close shuts down all servers. They accept no new connections, finish the requests in progress until ctx is done,
// and then close the rest. All goroutines have ended when Close returns. Apply returns an error that wraps
// [os.ErrClosed] afterwards.
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
