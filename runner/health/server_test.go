package health

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// serveTest serves "ok" with a limit of connections until the test ends.
func serveTest(t *testing.T, limit int) (addr string, c *conns) {
	t.Helper()
	c = newConns(limit)
	return serveService(t, c, types.NamespacedName{}), c
}

// serveService serves a port of a Service.
func serveService(t *testing.T, c *conns, service types.NamespacedName) (addr string) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }), c, service, nil)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-done })
	return l.Addr().String()
}

func (c *conns) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open.Len()
}

// TestManyConnectionsKeepNobodyOut opens far more connections than a server may have.
// Its connections must stay bounded, and others must be answered.
func TestManyConnectionsKeepNobodyOut(t *testing.T) {
	const limit, many = 20, 2000
	for name, send := range map[string]string{
		"idle from the start":  "",
		"idle after a request": "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"half a request":       "GET / HTTP/1.1\r\nHost: x\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			addr, c := serveTest(t, limit)
			probe := func() {
				t.Helper()
				client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
				r := must.Get(client.Get("http://" + addr))(t)
				r.Body.Close()
			}
			for i := range many {
				conn := must.Get(net.Dial("tcp", addr))(t)
				t.Cleanup(func() { conn.Close() })
				if send != "" {
					// An error means that the server has closed it.
					_, _ = conn.Write([]byte(send))
				}
				if n := c.count(); n > limit {
					t.Fatalf("%d connections are open, want at most %d", n, limit)
				}
				if i%500 == 499 {
					probe()
				}
			}
			probe()
		})
	}
}

// TestBusyConnectionIsKept opens connections beyond the limit while one client sends
// requests over its own. That one must stay.
func TestBusyConnectionIsKept(t *testing.T) {
	const limit = 10
	addr, _ := serveTest(t, limit)
	conn := must.Get(net.Dial("tcp", addr))(t)
	defer conn.Close()
	ask := func(conn net.Conn, answers *bufio.Reader) {
		t.Helper()
		fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		r := must.Get(http.ReadResponse(answers, nil))(t)
		must.Get(io.Copy(io.Discard, r.Body))(t)
		r.Body.Close()
	}
	answers := bufio.NewReader(conn)
	for range 20 {
		for range limit / 2 {
			other := must.Get(net.Dial("tcp", addr))(t)
			t.Cleanup(func() { other.Close() })
			ask(other, bufio.NewReader(other)) // the server has accepted it before the next one comes
		}
		ask(conn, answers)
	}
}

// TestFloodOfAPortKeepsChecksOfOthers holds a connection to a Service's port, as a health check does
// between its connection and its request, while others are flooded.
func TestFloodOfAPortKeepsChecksOfOthers(t *testing.T) {
	const limit = 20
	c := newConns(limit)
	victim := serveService(t, c, types.NamespacedName{Namespace: "victim", Name: "a"})
	var flooded []string
	for _, name := range []string{"b", "c", "d"} {
		flooded = append(flooded, serveService(t, c, types.NamespacedName{Namespace: "tenant", Name: name}))
	}
	check := must.Get(net.Dial("tcp", victim))(t)
	defer check.Close()
	for i := range 10 * limit {
		conn := must.Get(net.Dial("tcp", flooded[i%len(flooded)]))(t)
		defer conn.Close()
	}
	fmt.Fprint(check, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if r, err := http.ReadResponse(bufio.NewReader(check), nil); err != nil {
		t.Error(err)
	} else {
		r.Body.Close()
	}
	if n := c.count(); n > limit {
		t.Errorf("%d connections are open", n)
	}
}

// TestFloodOfAClientKeepsOthers floods a server from one address.
func TestFloodOfAClientKeepsOthers(t *testing.T) {
	const limit = 20
	addr, _ := serveTest(t, limit)
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	check, err := d.Dial("tcp", addr)
	if err != nil {
		t.Skip("the system has no second loopback address: ", err)
	}
	defer check.Close()
	for range 10 * limit {
		conn := must.Get(net.Dial("tcp", addr))(t)
		defer conn.Close()
	}
	fmt.Fprint(check, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if r, err := http.ReadResponse(bufio.NewReader(check), nil); err != nil {
		t.Error(err)
	} else {
		r.Body.Close()
	}
}

func TestVictims(t *testing.T) {
	pipe := func() net.Conn { a, b := net.Pipe(); t.Cleanup(func() { a.Close(); b.Close() }); return a }
	a, b, x, y := pipe(), pipe(), pipe(), pipe()
	c := newConns(2)
	for i, step := range []struct {
		conn  net.Conn
		state http.ConnState
		want  net.Conn
	}{
		{a, http.StateNew, nil},
		{b, http.StateNew, nil},
		{a, http.StateActive, nil},
		{x, http.StateNew, b},      // the one that waits
		{b, http.StateActive, nil}, // is no longer known, so x stays
		{b, http.StateClosed, nil},
		{x, http.StateActive, nil},
		{y, http.StateNew, a}, // all are busy: the first, and not the new one
		{y, http.StateActive, nil},
		{x, http.StateIdle, nil},
		{x, http.StateActive, nil},
		{a, http.StateNew, y},
		{a, http.StateHijacked, nil},
		{y, http.StateClosed, nil},
		{x, http.StateClosed, nil},
	} {
		if got := c.record(step.conn, step.state, types.NamespacedName{}); got != step.want {
			t.Errorf("step %d: closes %v, want %v", i, got, step.want)
		}
	}
	if n := c.count(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
}

func TestServerHasTimeouts(t *testing.T) {
	s := NewServer(http.NotFoundHandler(), nil)
	if s.ReadHeaderTimeout == 0 || s.ReadTimeout == 0 || s.WriteTimeout == 0 || s.IdleTimeout == 0 || s.ConnState == nil || s.ErrorLog == nil {
		t.Errorf("%+v", s)
	}
	_ = s.Shutdown(context.Background())
}
