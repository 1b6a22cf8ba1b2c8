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

func (b *Backend) listenTCP(lc *net.ListenConfig, bi *binding) (socket, error) {
	l, err := lc.Listen(b.ctx, "tcp", bi.at.String())
	if err != nil {
		return nil, err
	}
	s := l.(*net.TCPListener)
	b.running.Go(func() { b.accept(s, bi) })
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
	a := client.RemoteAddr().(*net.TCPAddr).AddrPort()
	c := &conn{client: client, at: bi.at, from: netip.AddrPortFrom(a.Addr().Unmap(), a.Port())}
	c.ctx, c.cut = context.WithCancel(b.ctx)
	var h fairshare.Holder
	if r := bi.rule.Load(); r != nil {
		h = r.service.holder(c.from)
	}
	b.connectionsMu.Lock()
	victim, full := b.connections.Add(c, h)
	b.connectionsMu.Unlock()
	if full {
		victim.cut()
		b.config.Refused(v1.ProtocolTCP, victim.at)
	}
	return c
}

// serve serves one connection to its end.
func (b *Backend) serve(c *conn, bi *binding) {
	defer func() {
		c.cut()
		b.connectionsMu.Lock()
		defer b.connectionsMu.Unlock()
		b.connections.Remove(c)
	}()
	defer context.AfterFunc(c.ctx, func() { reset(c.client) })()
	e, server := b.connect(c.ctx, bi, c.from)
	if e == nil {
		reset(c.client)
		if c.ctx.Err() == nil {
			b.config.Refused(v1.ProtocolTCP, bi.at)
		}
		return
	}
	e.service.made.Add(1)
	defer e.leave()
	defer context.AfterFunc(e.drained, c.cut)()
	both := func() {
		reset(c.client)
		reset(server)
	}
	defer context.AfterFunc(c.ctx, both)()
	var wg sync.WaitGroup
	wg.Go(func() { forward(server, c.client, both) })
	forward(c.client, server, both)
	wg.Wait()
	c.client.Close()
	server.Close()
}

// connect dials endpoints for a client until one answers, and enters there. It returns nil if no endpoint answers.
func (b *Backend) connect(ctx context.Context, bi *binding, from netip.AddrPort) (*endpoint, net.Conn) {
	var tried []netip.AddrPort
	for range attempts {
		// The rule may have changed during a failed dial, which can take seconds.
		r := bi.rule.Load()
		if r == nil {
			break
		}
		s := r.service
		ep := s.pick(r.target(from.Addr(), bi.at.Addr()), from, tried)
		if ep == nil { // even if the connection must be refused or dropped
			break
		}
		e := s.enter(ep.Addr)
		server, err := b.dial(ctx, s, ep.Addr)
		if err == nil && e.drained.Err() == nil {
			return e, server
		}
		e.leave()
		if err == nil { // the endpoint was removed during the dial
			server.Close()
			continue
		}
		if ctx.Err() != nil {
			break
		}
		tried = append(tried, ep.Addr)
		b.config.Log.Debug("cannot reach endpoint", "service", s.key, "endpoint", ep, "error", err)
	}
	return nil, nil
}

// errOwnSocket is the error of an endpoint that leads back to this process.
var errOwnSocket = errors.New("this process listens there for a Service")

// dial dials an endpoint, unless the Backend listens there: the connection would come back, and go
// around for ever.
func (b *Backend) dial(ctx context.Context, s *service, to netip.AddrPort) (net.Conn, error) {
	k := s.key
	if b.Listens(to, k.Protocol) {
		b.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "endpoint is not used: "+errOwnSocket.Error(), "endpoint", to)
		return nil, errOwnSocket
	}
	ctx, cancel := context.WithTimeout(ctx, b.config.DialTimeout)
	defer cancel()
	return b.config.Dial(ctx, strings.ToLower(string(k.Protocol)), to)
}

// conn is a client's connection.
type conn struct {
	client *net.TCPConn
	from   netip.AddrPort // the client
	at     netip.AddrPort // the frontend
	// ctx ends with the process. Its end ends the dial and resets both connections, and so does cut.
	ctx context.Context
	cut context.CancelFunc
}

// reset resets a connection, unless it is closed.
func reset(c net.Conn) {
	if l, ok := c.(interface{ SetLinger(int) error }); ok {
		l.SetLinger(0)
	}
	c.Close()
}

// forward copies the data of one side to the other until it has closed, and then closes that direction. After a failure
// it calls failed.
func forward(to, from net.Conn, failed func()) {
	_, err := io.Copy(to, from)
	if err == nil {
		if w, ok := to.(interface{ CloseWrite() error }); ok {
			err = w.CloseWrite()
		}
	}
	if err != nil {
		failed()
	}
}
