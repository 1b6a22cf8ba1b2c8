package dataplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
)

const (
	tcp = v1.ProtocolTCP
	udp = v1.ProtocolUDP
)

func TestEachSideClosesByItself(t *testing.T) {
	t.Parallel()
	w, port := newServed(t, Config{}, "web", tcp, serveTCP(t, "a"))
	c := w.connect(port)
	sent := make([]byte, 3<<20)
	rand.NewChaCha8([32]byte{}).Read(sent)
	go func() {
		c.Write(sent)
		c.CloseWrite()
	}()
	got, err := io.ReadAll(c.r)
	if want := append(sent, "bye"...); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes came back, %v; want %d", len(got), err, len(want))
	}
	eventually(t, "no connection is left", func() bool { return w.backend.Stats().Connections == 0 })
}

func TestResetIsForwarded(t *testing.T) {
	t.Parallel()
	w, port := newWorld(t, Config{}), freePort(t, "tcp")
	seen := make(chan error, 1)
	w.service("web", tcp, port)
	w.endpoints("web", tcp, serve(t, func(c *net.TCPConn) {
		io.WriteString(c, "a\n")
		_, err := c.Read(make([]byte, 1))
		if err == nil { // the client asks for a reset
			c.SetLinger(0)
			return
		}
		seen <- err
	}))
	w.sync()
	c := w.connect(port)
	c.SetLinger(0)
	c.Close()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the endpoint's error is %v, want a reset", err)
	}
	c = w.connect(port)
	c.Write([]byte("x"))
	if _, err := c.r.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client's error is %v, want a reset", err)
	}
}

func TestUnreachableEndpointCostsNoConnection(t *testing.T) {
	t.Parallel()
	var failed, refused atomic.Int64
	w, port := newWorld(t, Config{
		Refused: func(v1.Protocol, netip.AddrPort) { refused.Add(1) },
		Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, to.String())
			if err != nil {
				failed.Add(1)
			}
			return c, err
		},
	}), freePort(t, "tcp")
	dead := []netip.AddrPort{netip.AddrPortFrom(localhost, freePort(t, "tcp")), netip.AddrPortFrom(localhost, freePort(t, "tcp"))}
	w.service("web", tcp, port)
	w.endpoints("web", tcp, append(dead, serveTCP(t, "a"))...)
	w.sync()
	for range 12 {
		if c := w.connect(port); c.name != "a" {
			t.Errorf("reached %q", c.name)
		}
	}
	if s := w.backend.Stats(); failed.Load() == 0 || s.Connections != 12 {
		t.Errorf("%d dials failed, stats %+v", failed.Load(), s)
	}
	w.endpoints("web", tcp, dead...)
	w.sync()
	if _, err := connect(port); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("with dead endpoints alone: %v", err)
	}
	eventually(t, "one connection is refused", func() bool { return refused.Load() == 1 })
}

func TestDialOfASilentEndpointEnds(t *testing.T) {
	t.Parallel()
	var given sync.WaitGroup
	var dialed atomic.Bool
	slow := netip.MustParseAddrPort("127.0.0.1:1")
	var d net.Dialer
	w := newWorld(t, Config{DialTimeout: time.Second, Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		if to == slow {
			dialed.Store(true)
			given.Add(1)
			defer given.Done()
			<-ctx.Done()
			return nil, ctx.Err()
		}
		// The dial of the other endpoint may be slow on a busy machine.
		return d.DialContext(context.WithoutCancel(ctx), network, to.String())
	}})
	port := freePort(t, "tcp")
	w.service("web", tcp, port)
	w.endpoints("web", tcp, slow, serveTCP(t, "a"))
	w.sync()
	for range 2 {
		if c := w.connect(port); c.name != "a" {
			t.Errorf("reached %q", c.name)
		}
	}
	given.Wait()
	if !dialed.Load() {
		t.Error("the silent endpoint was not dialed")
	}
}

// TestRemovedEndpointIsDrained also checks that the connections of an endpoint that is back
// continue.
func TestRemovedEndpointIsDrained(t *testing.T) {
	t.Parallel()
	a, b := serveTCP(t, "a"), serveTCP(t, "b")
	t.Run("connections continue", func(t *testing.T) {
		w, port := newServed(t, Config{Drain: time.Hour}, "web", tcp, a)
		c := w.connect(port)
		drains := func() bool {
			s := w.backend.services[w.engine.Snapshot().Ports[0].Key]
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.endpoints[a].end != nil
		}
		for _, step := range []struct {
			endpoints []netip.AddrPort
			drains    bool
			next      string
		}{
			{[]netip.AddrPort{b}, true, "b"},
			{[]netip.AddrPort{a}, false, "a"},
			{[]netip.AddrPort{b}, true, "b"},
		} {
			w.endpoints("web", tcp, step.endpoints...)
			w.sync()
			if err := c.echo(); err != nil || drains() != step.drains {
				t.Errorf("endpoints %v: %v, drains %t", step.endpoints, err, drains())
			}
			if got := w.connect(port).name; got != step.next {
				t.Errorf("a new connection reached %q", got)
			}
		}
		// A removed Service is drained too.
		w.service("other", tcp, freePort(t, "tcp"))
		w.sync()
		w.service("web", tcp, freePort(t, "tcp"))
		w.sync()
		if err := c.echo(); err != nil {
			t.Errorf("a connection to the removed frontend: %v", err)
		}
		if _, err := connect(port); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("a new connection to the removed frontend: %v", err)
		}
	})
	for _, drain := range []time.Duration{-1, time.Millisecond} {
		t.Run("connections are reset", func(t *testing.T) {
			w, port := newServed(t, Config{Drain: drain}, "web", tcp, a, b)
			gone, stays := w.connect(port), w.connect(port)
			if gone.name == "b" {
				gone, stays = stays, gone
			}
			w.endpoints("web", tcp, b)
			w.sync()
			if _, err := gone.r.ReadByte(); !ended(err) {
				t.Errorf("connection to the removed endpoint: %v", err)
			}
			if err := stays.echo(); err != nil {
				t.Errorf("connection to the other: %v", err)
			}
		})
	}
}

// TestEndpointRemovedDuringDialIsReplaced uses a Drain that resets connections immediately.
func TestEndpointRemovedDuringDialIsReplaced(t *testing.T) {
	t.Parallel()
	a, b := serveTCP(t, "a"), serveTCP(t, "b")
	dialed, gone := make(chan struct{}), make(chan struct{})
	var d net.Dialer
	w := newWorld(t, Config{Drain: -1, Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		if to == a {
			close(dialed)
			<-gone
		}
		return d.DialContext(ctx, network, to.String())
	}})
	port := freePort(t, "tcp")
	w.service("web", tcp, port)
	w.endpoints("web", tcp, a)
	w.sync()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := connect(port); err != nil {
			t.Error(err)
		} else if c.Close(); c.name != "b" {
			t.Errorf("reached %q", c.name)
		}
	}()
	<-dialed
	w.endpoints("web", tcp, b)
	w.sync()
	close(gone)
	<-done
}

// TestFloodOfConnectionsEndsItsOwn floods the Services of one namespace beside a connection to another
// one. Half of the flood waits for an endpoint that does not answer.
func TestFloodOfConnectionsEndsItsOwn(t *testing.T) {
	t.Parallel()
	const limit = 10
	silent := netip.MustParseAddrPort("192.0.2.1:1")
	var limited atomic.Int64
	w := newWorld(t, Config{MaxConnections: limit, Refused: func(v1.Protocol, netip.AddrPort) { limited.Add(1) }, Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		if to == silent {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, network, to.String())
	}})
	endpoint := serveTCP(t, "a")
	victim := freePort(t, "tcp")
	w.service("victim", tcp, victim)
	w.endpoints("victim", tcp, endpoint)
	w.namespace = "tenant"
	var flooded []uint16
	for i := range 4 {
		name, port := fmt.Sprint("t", i), freePort(t, "tcp")
		flooded = append(flooded, port)
		w.service(name, tcp, port)
		if i%2 == 0 {
			w.endpoints(name, tcp, endpoint)
		} else {
			w.endpoints(name, tcp, silent)
		}
	}
	w.sync()
	before := w.connect(victim)
	const flood = 20 * limit
	for i := range flood {
		c := must.Get(net.Dial("tcp", netip.AddrPortFrom(localhost, flooded[i%len(flooded)]).String()))(t)
		defer c.Close()
	}
	eventually(t, "all but the limit have ended", func() bool {
		return w.backend.Stats().Connections == limit && limited.Load() == flood+1-limit
	})
	if err := before.echo(); err != nil {
		t.Errorf("the connection of another namespace: %v", err)
	}
	after := w.connect(victim)
	if err := after.echo(); err != nil {
		t.Errorf("a new connection of another namespace: %v", err)
	}
	if err := before.echo(); err != nil {
		t.Errorf("the connection of another namespace, after a new one: %v", err)
	}
}

// heldBefore has an address that an earlier process held and that cannot be released.
type heldBefore struct{ onlyLoopback }

func (heldBefore) Held() ([]netip.Addr, error) {
	return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
}
func (heldBefore) Release(netip.Addr) error { return syscall.EPERM }

// TestAddressThatStaysFailsNoService starts with an address of an earlier process.
func TestAddressThatStaysFailsNoService(t *testing.T) {
	t.Parallel()
	w, port := newServed(t, Config{Addresses: heldBefore{}}, "web", tcp, serveTCP(t, "web"))
	w.connect(port)
}

// TestTakenPortFailsOneService also checks that the Service is served once the other program
// closes the port.
func TestTakenPortFailsOneService(t *testing.T) {
	t.Parallel()
	w, free := newWorld(t, Config{}), freePort(t, "tcp")
	other := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer other.Close()
	taken := other.Addr().(*net.TCPAddr).AddrPort().Port()
	w.service("taken", tcp, taken)
	w.service("free", tcp, free)
	for _, name := range []string{"taken", "free"} {
		w.endpoints(name, tcp, serveTCP(t, name))
	}
	for range 2 {
		err := w.cursor.Sync(t.Context())
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatalf("error %v", err)
		}
	}
	w.connect(free)
	other.Close()
	w.sync()
	if c := w.connect(taken); c.name != "taken" {
		t.Errorf("reached %q", c.name)
	}
}

func TestPortMovesBetweenServicesWithoutLoss(t *testing.T) {
	t.Parallel()
	w, port, spare := newWorld(t, Config{}), freePort(t, "tcp"), freePort(t, "tcp")
	w.endpoints("a", tcp, serveTCP(t, "a"))
	w.endpoints("b", tcp, serveTCP(t, "b"))
	w.service("a", tcp, port)
	w.service("b", tcp, spare)
	w.sync()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	seen := map[string]int{}
	wg.Go(func() {
		for {
			c, err := connect(port)
			if err != nil {
				t.Error(err)
				return
			}
			c.SetLinger(0)
			c.Close()
			seen[c.name]++
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	for i := range 100 {
		names := []string{"a", "b"}
		w.service(names[i%2], tcp, spare)
		w.service(names[(i+1)%2], tcp, port)
		w.sync()
		if c, err := connect(port); err != nil || c.name != names[(i+1)%2] {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	close(stop)
	wg.Wait()
	if seen["a"] == 0 || seen["b"] == 0 {
		t.Errorf("reached %v", seen)
	}
}

func TestShutdownWaitsForConnections(t *testing.T) {
	t.Parallel()
	w, port := newServed(t, Config{}, "web", tcp, serveTCP(t, "a"))
	polite, stubborn := w.connect(port), w.connect(port)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.backend.Shutdown(ctx) }()
	eventually(t, "no socket listens", func() bool {
		c, err := net.Dial("tcp", netip.AddrPortFrom(localhost, port).String())
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	for _, c := range []*client{polite, stubborn} {
		if err := c.echo(); err != nil {
			t.Errorf("during Shutdown: %v", err)
		}
	}
	polite.Close()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if _, err := stubborn.r.ReadByte(); !ended(err) {
		t.Errorf("the last connection: %v", err)
	}
	if err := w.backend.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if s := w.backend.Stats(); s.Connections != 0 || s.Sockets != 0 {
		t.Errorf("stats %+v", s)
	}
	w.endpoints("web", tcp)
	if err := w.cursor.Sync(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Apply after Shutdown: %v", err)
	}
}
