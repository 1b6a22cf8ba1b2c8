package dataplane

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// world is a Backend on the loopback interface, where Services have the address 127.0.0.1
// and ports from freePort.
type world struct {
	t       *testing.T
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
	slices  map[string]int
	created int64 // the creation time of the next Services, in seconds
	// namespace has the next Services and slices.
	namespace string
}

func newWorld(t *testing.T, c Config) *world {
	t.Helper()
	w := &world{t: t, slices: map[string]int{}, namespace: "ns"}
	w.tracker = must.Get(tracker.New(tracker.Config{}))(t)
	w.backend = New(c)
	t.Cleanup(func() { w.backend.Close() })
	w.follow(ruleset.Config{})
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return w
}

// follow attaches the Backend to a new engine.
func (w *world) follow(c ruleset.Config) {
	w.t.Helper()
	c.Source = w.tracker
	w.engine = must.Get(ruleset.NewEngine(c))(w.t)
	w.cursor = w.engine.Attach("userspace", w.backend)
}

// newNodePort returns a world of a node without other addresses than 127.0.0.1, at which NodePorts are served, with
// a Service and its endpoint.
func newNodePort(t *testing.T, c Config, nodePort uint16) *world {
	t.Helper()
	c.Addresses = onlyLoopback{}
	w := newWorld(t, c)
	w.follow(ruleset.Config{NodePortAddresses: must.Get(ruleset.ParseNodePortAddresses([]string{"localhost"}))(t)})
	w.tracker.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "node-port"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, ClusterIP: "127.0.0.1", ClusterIPs: []string{"127.0.0.1"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Port: int32(freePort(t, "tcp")), NodePort: int32(nodePort), Protocol: tcp}},
		},
	})
	w.endpoints("node-port", tcp, serveTCP(t, "a"))
	return w
}

// onlyLoopback implements [Addresses] for a node whose interfaces have 127.0.0.1.
type onlyLoopback struct{ noAddresses }

func (onlyLoopback) Own() ([]netip.Addr, error) { return []netip.Addr{localhost}, nil }

var localhost = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// newServed returns a world with a Service at a free port, and the port.
func newServed(t *testing.T, c Config, service string, proto v1.Protocol, endpoints ...netip.AddrPort) (*world, uint16) {
	t.Helper()
	w, port := newWorld(t, c), freePort(t, strings.ToLower(string(proto)))
	w.service(service, proto, port)
	w.endpoints(service, proto, endpoints...)
	w.sync()
	return w, port
}

func (w *world) sync() {
	w.t.Helper()
	must.Do(w.t, w.cursor.Sync(context.Background()))
}

// service sets a Service at a port.
func (w *world) service(name string, proto v1.Protocol, port uint16) {
	w.tracker.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, CreationTimestamp: metav1.Unix(w.created, 0)},
		Spec: v1.ServiceSpec{
			ClusterIP: "127.0.0.1", ClusterIPs: []string{"127.0.0.1"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Port: int32(port), Protocol: proto}},
		},
	})
}

// endpoints replaces a Service's endpoints.
func (w *world) endpoints(name string, proto v1.Protocol, at ...netip.AddrPort) {
	for i := range max(len(at), w.slices[name]) {
		slice := types.NamespacedName{Namespace: w.namespace, Name: fmt.Sprint(name, "-", i)}
		if i >= len(at) {
			w.tracker.DeleteSlice(slice)
			continue
		}
		unnamed, port := "", int32(at[i].Port())
		w.tracker.SetSlice(&discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: w.namespace, Name: slice.Name, Labels: map[string]string{discovery.LabelServiceName: name},
			},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &unnamed, Protocol: &proto, Port: &port}},
			Endpoints:   []discovery.Endpoint{{Addresses: []string{at[i].Addr().String()}}},
		})
	}
	w.slices[name] = len(at)
}

// nextPort is freePort's next candidate, below the systems' ephemeral ports.
var nextPort atomic.Int32

// freePort returns an unused port of 127.0.0.1. Neither the system nor another test will
// allocate it.
func freePort(t testing.TB, network string) uint16 {
	t.Helper()
	for {
		n := 20000 + nextPort.Add(1)
		if n > 30000 {
			t.Fatal("no port is free")
		}
		at := fmt.Sprint("127.0.0.1:", n)
		var c io.Closer
		var err error
		if network == "udp" {
			c, err = net.ListenPacket("udp", at)
		} else {
			c, err = net.Listen("tcp", at)
		}
		if err == nil {
			c.Close()
			return uint16(n)
		}
	}
}

// serveTCP starts an endpoint that sends its name in a line, echoes until the client closes
// its side, and ends with "bye".
func serveTCP(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	return serve(t, func(c *net.TCPConn) {
		fmt.Fprintln(c, name)
		if _, err := io.Copy(c, c); err == nil {
			fmt.Fprint(c, "bye")
		}
	})
}

// serve starts an endpoint. It closes a connection when f returns or the test ends.
func serve(t *testing.T, f func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		l.Close()
		cancel()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				f(c.(*net.TCPConn))
			})
		}
	})
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// client is a connection to a Service.
type client struct {
	*net.TCPConn
	r *bufio.Reader
	// name is the name that the endpoint sent.
	name string
}

// connect opens a connection and reads the endpoint's name.
func connect(port uint16) (*client, error) {
	conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(localhost, port).String(), testtime.Timeout)
	if err != nil {
		return nil, err
	}
	conn.SetDeadline(time.Now().Add(testtime.Timeout))
	c := &client{conn.(*net.TCPConn), bufio.NewReader(conn), ""}
	if c.name, err = c.r.ReadString('\n'); err != nil {
		c.Close()
		return nil, err
	}
	c.name = strings.TrimSpace(c.name)
	return c, nil
}

func (w *world) connect(port uint16) *client {
	w.t.Helper()
	c := must.Get(connect(port))(w.t)
	w.t.Cleanup(func() { c.Close() })
	return c
}

// echo sends a line and reads it back.
func (c *client) echo() error {
	if _, err := fmt.Fprintln(c, "hello"); err != nil {
		return err
	}
	line, err := c.r.ReadString('\n')
	if err == nil && line != "hello\n" {
		err = fmt.Errorf("got %q", line)
	}
	return err
}

// eventually waits until f reports true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(testtime.Timeout); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not after %s", what, testtime.Timeout)
		}
	}
}

// ended reports whether the other side reset or closed a connection. A timeout is no end.
func ended(err error) bool {
	var timeout net.Error
	return err != nil && !(errors.As(err, &timeout) && timeout.Timeout())
}

// Stats holds the current load of a [Backend], and the number of connections and sessions that endpoints had.
type Stats struct{ Sockets, Connections, Sessions, Made int }

func (b *Backend) Stats() Stats {
	traffic, _ := b.Traffic(context.Background())
	b.connectionsMu.Lock()
	defer b.connectionsMu.Unlock()
	b.sessions.mu.Lock()
	defer b.sessions.mu.Unlock()
	s := Stats{Connections: b.connections.Len(), Sessions: b.sessions.all.Len()}
	if traffic != nil {
		for _, c := range traffic.Services {
			s.Made += int(c.Connections)
		}
	}
	b.listening.Range(func(any, any) bool {
		s.Sockets++
		return true
	})
	return s
}
