package dataplane

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/fairshare"
	"github.com/go-proxier/proxier/ruleset"
)

// maxDatagram is the longest UDP payload.
const maxDatagram = 65535

// replyTimeout is how long a replaced session waits for outstanding answers.
const replyTimeout = 5 * time.Second

// buffers holds buffers for one datagram each.
var buffers = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// udpSocket receives the datagrams of a place.
type udpSocket struct {
	backend *Backend
	binding *binding
	*net.UDPConn
	// clients holds the current session of each client. ended reports that the socket is
	// closed and gets no new sessions. sessions.mu guards both.
	clients map[netip.AddrPort]*session
	ended   bool
}

// Close closes the socket and ends its sessions.
func (u *udpSocket) Close() error {
	err := u.UDPConn.Close()
	all := &u.backend.sessions
	all.mu.Lock()
	u.ended = true
	var mine []*session
	for s := range all.all.All() {
		if s.socket == u {
			mine = append(mine, s)
		}
	}
	all.mu.Unlock()
	for _, s := range mine {
		s.end()
	}
	return err
}

func (b *Backend) listenUDP(lc *net.ListenConfig, bi *binding) (socket, error) {
	c, err := lc.ListenPacket(b.ctx, "udp", bi.at.String())
	if err != nil {
		return nil, err
	}
	u := &udpSocket{backend: b, binding: bi, UDPConn: c.(*net.UDPConn), clients: map[netip.AddrPort]*session{}}
	b.running.Go(u.receive)
	return u, nil
}

// receive forwards the clients' datagrams until the socket is closed.
func (u *udpSocket) receive() {
	for {
		// A socket takes a buffer only to read: most sockets wait most of the time.
		err := readable(u.UDPConn)
		if err == nil {
			err = u.forward()
		}
		// Other errors are ICMP errors for a sent datagram.
		if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// forward forwards one datagram to the client's endpoint.
func (u *udpSocket) forward() error {
	buf := buffers.Get().(*[maxDatagram]byte)
	defer buffers.Put(buf)
	n, from, err := u.ReadFromUDPAddrPort(buf[:])
	if err != nil {
		return err
	}
	s := u.session(from)
	if s == nil {
		u.backend.config.Refused(v1.ProtocolUDP, u.binding.at)
		return nil
	}
	s.used()
	// A read reports an endpoint that cannot be reached.
	_, _ = s.conn.Write(buf[:n])
	return nil
}

// session returns the session of a client, and opens one if necessary. It returns nil if no
// endpoint can be used.
func (u *udpSocket) session(client netip.AddrPort) *session {
	r := u.binding.rule.Load()
	if r == nil {
		return nil
	}
	all := &u.backend.sessions
	all.mu.Lock()
	s := u.clients[client]
	good := s != nil && s.good(r)
	if good {
		all.all.Use(s, false)
	} else {
		delete(u.clients, client)
	}
	all.mu.Unlock()
	if good {
		return s
	}
	if s != nil {
		s.replace()
	}
	return u.open(client)
}

func (u *udpSocket) open(client netip.AddrPort) *session {
	b := u.backend
	e, c := b.connect(b.ctx, u.binding, netip.AddrPortFrom(client.Addr().Unmap(), client.Port()))
	if e == nil {
		return nil
	}
	s := &session{socket: u, client: client, conn: c, endpoint: e}
	s.timeout.Store(int64(b.config.UDPTimeout))
	s.used()
	if !b.sessions.add(s) {
		e.leave()
		c.Close()
		return nil
	}
	e.service.made.Add(1)
	b.running.Go(s.answer)
	return s
}

// session forwards the datagrams between one client and one endpoint.
type session struct {
	socket   *udpSocket
	client   netip.AddrPort
	conn     net.Conn // to the endpoint
	endpoint *endpoint
	// checked is the last version of the Service that was checked to have the endpoint.
	// Only receive uses it.
	checked *ruleset.Port

	last atomic.Int64 // time of the last use, in Unix nanoseconds
	// timeout is how long the session continues without a use, a time.Duration.
	timeout atomic.Int64
	closed  atomic.Bool
}

// good reports whether the client's next datagram can use the session.
func (s *session) good(r *rule) bool {
	if s.closed.Load() || s.endpoint.service != r.service || s.socket.backend.Listens(s.endpoint.addr, v1.ProtocolUDP) {
		return false
	}
	now := r.service.now.Load()
	if now != s.checked {
		if !serves(now, s.endpoint.addr) {
			return false
		}
		s.checked = now
	}
	return true
}

func (s *session) used() { s.last.Store(time.Now().UnixNano()) }

// replace makes the session forward answers for a while alone.
func (s *session) replace() {
	s.timeout.Store(min(s.timeout.Load(), int64(replyTimeout)))
	s.used()
	s.conn.SetReadDeadline(s.expiry()) // wakes answer
}

// expiry returns when the session ends without another use.
func (s *session) expiry() time.Time { return time.Unix(0, s.last.Load()+s.timeout.Load()) }

func (s *session) end() {
	if s.closed.Swap(true) {
		return
	}
	s.conn.Close()
	s.endpoint.leave()
	s.socket.backend.sessions.remove(s)
}

// answer forwards the endpoint's datagrams until the session has been idle for too long.
func (s *session) answer() {
	defer s.end()
	for {
		end := s.expiry()
		if time.Until(end) <= 0 {
			return
		}
		s.conn.SetReadDeadline(end)
		// A session takes a buffer only to read: most sessions wait most of the time.
		err := readable(s.conn)
		if err == nil {
			err = s.pass()
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return // the session is closed, or the endpoint refuses
		}
	}
}

// pass forwards one datagram to the client.
func (s *session) pass() error {
	buf := buffers.Get().(*[maxDatagram]byte)
	defer buffers.Put(buf)
	n, err := s.conn.Read(buf[:])
	if err != nil {
		return err
	}
	s.used()
	// A client that cannot be reached does not affect the session.
	_, _ = s.socket.WriteToUDPAddrPort(buf[:n], s.client)
	return nil
}

// readable waits until the connection has data to read, or its deadline. On systems without
// peek it returns immediately.
func readable(c net.Conn) error {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		ready, err := peek(fd)
		failed = err
		return ready || err != nil
	})
	return errors.Join(err, failed)
}

type sessions struct {
	mu  sync.Mutex
	all *fairshare.Table[*session]
}

// add adds a session, and ends another one if there are too many. It reports false if the socket is
// closed.
func (a *sessions) add(s *session) bool {
	a.mu.Lock()
	if s.socket.ended {
		a.mu.Unlock()
		return false
	}
	victim, full := a.all.Add(s, s.endpoint.service.holder(s.client))
	s.socket.clients[s.client] = s
	a.mu.Unlock()
	if full {
		victim.end()
	}
	return true
}

func (a *sessions) remove(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all.Remove(s)
	if s.socket.clients[s.client] == s {
		delete(s.socket.clients, s.client)
	}
}
