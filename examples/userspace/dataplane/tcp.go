package dataplane

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/fairshare"
)

// tcpSocket accepts the connections of a place.
type tcpSocket struct{ l *net.TCPListener }

func (s *tcpSocket) listenTo(who audience) error { return setAudience(s.l, who) }
func (s *tcpSocket) close()                      { s.l.Close() }

func (b *Backend) listenTCP(lc *net.ListenConfig, bi *binding) (socket, error) {
	l, err := lc.Listen(b.ctx, "tcp", bi.at.String())
	if err != nil {
		return nil, err
	}
	s := &tcpSocket{l.(*net.TCPListener)}
	b.running.Go(func() { b.accept(s.l, bi) })
	return s, nil
}

// accept serves the connections of a place until its socket is closed.
func (b *Backend) accept(l *net.TCPListener, bi *binding) {
	pause := time.Duration(0)
	for {
		client, err := l.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Too many files are open, or the client has closed. A retry may succeed.
			pause = min(max(5*time.Millisecond, 2*pause), time.Second)
			b.config.Log.Warn("cannot accept a connection", "address", bi.at, "error", err)
			select {
			case <-time.After(pause):
			case <-b.ctx.Done():
				return
			}
			continue
		}
		pause = 0
		c := b.admit(client, bi)
		b.running.Go(func() { b.serve(c, bi) })
	}
}

// admit returns a new connection, and resets another one if there are too many.
func (b *Backend) admit(client *net.TCPConn, bi *binding) *conn {
	c := &conn{client: client, at: bi.at}
	c.ctx, c.cancel = context.WithCancel(b.ctx)
	a := client.RemoteAddr().(*net.TCPAddr).AddrPort()
	c.from = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	var h fairshare.Holder
	if r := bi.rule.Load(); r != nil {
		h = r.service.holder(c.from)
	}
	b.connectionsMu.Lock()
	victim, full := b.connections.Add(c, h)
	b.connectionsMu.Unlock()
	if full {
		victim.cut()
		victim.cancel()
		b.config.Refused(v1.ProtocolTCP, victim.at)
	}
	return c
}

// serve serves one connection to its end.
func (b *Backend) serve(c *conn, bi *binding) {
	defer c.close()
	defer func() {
		b.connectionsMu.Lock()
		defer b.connectionsMu.Unlock()
		b.connections.Remove(c)
	}()
	defer c.cancel()
	defer context.AfterFunc(c.ctx, c.cut)()

	service, at := b.connect(c, bi)
	if service == nil {
		c.cut()
		if c.ctx.Err() == nil {
			b.config.Refused(v1.ProtocolTCP, bi.at)
		}
		return
	}
	defer service.leave(at, c)
	c.copy()
}

// connect dials endpoints until one answers, and enters the connection there. It returns nil
// if no endpoint answers.
func (b *Backend) connect(c *conn, bi *binding) (*service, netip.AddrPort) {
	var tried []netip.AddrPort
	for range attempts {
		// The rule may have changed during a failed dial, which can take seconds.
		r := bi.rule.Load()
		if r == nil {
			break
		}
		s := r.service
		ep := s.pick(r.target(c.from.Addr(), bi.at.Addr()), c.from, tried)
		if ep == nil { // even if the connection must be refused or dropped
			break
		}
		s.enter(ep.Addr)
		server, err := b.dial(c.ctx, s, ep.Addr)
		if err == nil && s.attach(ep.Addr, c) {
			if c.join(server) {
				s.made.Add(1)
				return s, ep.Addr
			}
			s.leave(ep.Addr, c)
			break // the connection was cut during the dial
		}
		s.leave(ep.Addr, c)
		if err == nil { // the endpoint was removed during the dial
			server.Close()
			continue
		}
		if c.ctx.Err() != nil {
			break
		}
		tried = append(tried, ep.Addr)
		b.config.Log.Debug("cannot reach endpoint", "service", s.now.Load().Key, "endpoint", ep, "error", err)
	}
	return nil, netip.AddrPort{}
}

// errOwnSocket is the error of an endpoint that leads back to this process.
var errOwnSocket = errors.New("this process listens there for a Service")

// dial dials an endpoint, unless the Backend listens there: the connection would come back, and go
// around for ever.
func (b *Backend) dial(ctx context.Context, s *service, to netip.AddrPort) (net.Conn, error) {
	k := s.now.Load().Key
	if b.Listens(to, k.Protocol) {
		b.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "endpoint is not used: "+errOwnSocket.Error(), "endpoint", to)
		return nil, errOwnSocket
	}
	ctx, cancel := context.WithTimeout(ctx, b.config.DialTimeout)
	defer cancel()
	return b.config.Dial(ctx, strings.ToLower(string(k.Protocol)), to)
}

// conn is a client's connection and, once established, the connection to the endpoint.
type conn struct {
	client *net.TCPConn
	from   netip.AddrPort // the client
	at     netip.AddrPort // the frontend
	// ctx ends with the process. cancel ends the dial.
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	server net.Conn
	// reset makes close reset the connection. done reports that it is closed.
	reset, done bool
}

// join takes over the connection to the endpoint. If the client's connection is already
// closed, join closes the other one and reports false.
func (c *conn) join(server net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		server.Close()
		return false
	}
	c.server = server
	return true
}

// cut resets both sides.
func (c *conn) cut() {
	c.mu.Lock()
	c.reset = true
	c.mu.Unlock()
	c.close()
}

// close closes both sides.
func (c *conn) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return
	}
	c.done = true
	for _, x := range []net.Conn{c.client, c.server} {
		if x == nil {
			continue
		}
		if l, ok := x.(interface{ SetLinger(int) error }); ok && c.reset {
			l.SetLinger(0)
		}
		x.Close()
	}
}

// copy copies the data of either side to the other until both have closed. It also forwards
// the end of each side's data, and a failure as a reset.
func (c *conn) copy() {
	var wg sync.WaitGroup
	wg.Go(func() { c.half(c.server, c.client) })
	c.half(c.client, c.server)
	wg.Wait()
}

func (c *conn) half(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if err == nil {
		if w, ok := to.(interface{ CloseWrite() error }); ok {
			err = w.CloseWrite()
		}
	}
	if err != nil {
		c.cut()
	}
}
