package dataplane

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// serveUDP starts an endpoint that answers a datagram with its name and the datagram. If
// hold is not nil, the endpoint sends the datagram to hold before it answers.
func serveUDP(t *testing.T, name string, hold chan string) (netip.AddrPort, func()) {
	t.Helper()
	c := must.Get(net.ListenPacket("udp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, maxDatagram)
		for {
			n, from, err := c.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if hold != nil {
				hold <- string(buf[:n])
			}
			c.WriteTo(append([]byte(name+" "), buf[:n]...), from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort(), func() { c.Close() }
}

// udpClient returns a socket that sends to a port.
func udpClient(t *testing.T, port uint16) net.Conn {
	t.Helper()
	c := must.Get(net.Dial("udp", netip.AddrPortFrom(localhost, port).String()))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a text and returns the answer.
func ask(c net.Conn, text string) (string, error) {
	if _, err := c.Write([]byte(text)); err != nil {
		return "", err
	}
	return hear(c)
}

func hear(c net.Conn) (string, error) {
	buf := make([]byte, maxDatagram)
	c.SetReadDeadline(time.Now().Add(testtime.Timeout))
	n, err := c.Read(buf)
	return string(buf[:n]), err
}

// expect sends a text and fails the test unless it receives the wanted answer.
func expect(t *testing.T, c net.Conn, text, want string) {
	t.Helper()
	if got, err := ask(c, text); err != nil || got != want {
		t.Fatalf("for %.10q: %.20q, %v; want %.20q", text, got, err, want)
	}
}

func TestDatagramsOfAClientGoToOneEndpoint(t *testing.T) {
	t.Parallel()
	a, _ := serveUDP(t, "a", nil)
	b, _ := serveUDP(t, "b", nil)
	w, port := newServed(t, Config{}, "dns", udp, a, b)
	names := map[string]int{}
	for range 4 {
		c := udpClient(t, port)
		first := must.Get(ask(c, "x"))(t)
		names[first[:1]]++
		for i := range 5 {
			text := fmt.Sprintf("%0*d", 1+i*15000, i)
			expect(t, c, text, first[:2]+text)
		}
		expect(t, c, "", first[:2])
	}
	if names["a"] != 2 || names["b"] != 2 || w.backend.Stats().Sessions != 4 {
		t.Errorf("clients went to %v, stats %+v", names, w.backend.Stats())
	}
}

// TestUDPClientLeavesARemovedEndpoint also checks that a late answer arrives.
func TestUDPClientLeavesARemovedEndpoint(t *testing.T) {
	t.Parallel()
	hold := make(chan string)
	a, _ := serveUDP(t, "a", hold)
	b, _ := serveUDP(t, "b", nil)
	w, port := newServed(t, Config{}, "dns", udp, a)
	c := udpClient(t, port)
	c.Write([]byte("early"))
	eventually(t, "there is a session", func() bool { return w.backend.Stats().Sessions == 1 })
	w.endpoints("dns", udp, b)
	w.sync()
	expect(t, c, "next", "b next")
	if got := <-hold; got != "early" {
		t.Errorf("a got %q", got)
	}
	if got, err := hear(c); err != nil || got != "a early" {
		t.Errorf("the late answer: %q, %v", got, err)
	}
	expect(t, c, "after", "b after")
}

func TestUDPSessionToADeadEndpointEnds(t *testing.T) {
	t.Parallel()
	a, closeA := serveUDP(t, "a", nil)
	b, _ := serveUDP(t, "b", nil)
	_, port := newServed(t, Config{}, "dns", udp, a, b)
	var c net.Conn
	for name := ""; name != "a x"; {
		c = udpClient(t, port)
		var err error
		if name, err = ask(c, "x"); err != nil {
			t.Fatal(err)
		}
	}
	closeA()
	eventually(t, "the client is sent to b", func() bool {
		c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		c.Write([]byte("y"))
		buf := make([]byte, 10)
		n, _ := c.Read(buf)
		return string(buf[:n]) == "b y"
	})
}

func TestIdleUDPSessionEnds(t *testing.T) {
	t.Parallel()
	a, _ := serveUDP(t, "a", nil)
	w, port := newServed(t, Config{UDPTimeout: 50 * time.Millisecond}, "dns", udp, a)
	answered := func() {
		t.Helper()
		// On a busy machine a session may end before the endpoint has answered.
		eventually(t, "it is answered", func() bool {
			c := udpClient(t, port)
			c.SetReadDeadline(time.Now().Add(time.Second))
			c.Write([]byte("x"))
			buf := make([]byte, 10)
			n, _ := c.Read(buf)
			return string(buf[:n]) == "a x"
		})
	}
	for range 3 {
		answered()
	}
	eventually(t, "no session is left", func() bool { return w.backend.Stats().Sessions == 0 })
	answered()
}

func TestOldestUDPSessionIsEvicted(t *testing.T) {
	t.Parallel()
	a, _ := serveUDP(t, "a", nil)
	w, port := newServed(t, Config{MaxSessions: 3}, "dns", udp, a)
	steady := udpClient(t, port)
	for i := range 10 {
		expect(t, steady, "x", "a x")
		expect(t, udpClient(t, port), "x", "a x")
		if s := w.backend.Stats(); s.Sessions > 3 {
			t.Fatalf("after %d clients: %+v", i, s)
		}
	}
	// The client that keeps sending never had the oldest session.
	if s := w.backend.Stats(); s.Made != 11 {
		t.Errorf("stats %+v", s)
	}
}

// TestFloodOfDatagramsEndsItsOwnSessions sends to a Service of one namespace from many ports, while a
// client of another one waits for its answer.
func TestFloodOfDatagramsEndsItsOwnSessions(t *testing.T) {
	t.Parallel()
	w, victim, flooded := newWorld(t, Config{MaxSessions: 5}), freePort(t, "udp"), freePort(t, "udp")
	a, _ := serveUDP(t, "a", nil)
	w.service("victim", udp, victim)
	w.endpoints("victim", udp, a)
	w.namespace = "tenant"
	w.service("flooded", udp, flooded)
	w.endpoints("flooded", udp, a)
	w.sync()
	waits := udpClient(t, victim)
	expect(t, waits, "x", "a x")
	for range 50 {
		expect(t, udpClient(t, flooded), "x", "a x")
	}
	if s := w.backend.Stats(); s.Sessions != 5 || s.Made != 51 {
		t.Errorf("stats %+v", s)
	}
	w.backend.sessions.mu.Lock()
	defer w.backend.sessions.mu.Unlock()
	for s := range w.backend.sessions.all.All() {
		if s.endpoint.service.now.Load().Key.Namespace == "ns" {
			return
		}
	}
	t.Error("the session of another namespace has ended")
}

// TestUDPSessionsEndWithoutEndpoints also removes the Service.
func TestUDPSessionsEndWithoutEndpoints(t *testing.T) {
	t.Parallel()
	a, _ := serveUDP(t, "a", nil)
	w, port := newServed(t, Config{}, "dns", udp, a)
	c := udpClient(t, port)
	expect(t, c, "x", "a x")
	w.endpoints("dns", udp)
	w.sync()
	if _, err := ask(c, "x"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("without endpoints: %v", err)
	}
	eventually(t, "no session is left", func() bool { return w.backend.Stats().Sessions == 0 })
	w.endpoints("dns", udp, a)
	w.sync()
	expect(t, c, "x", "a x")
}
