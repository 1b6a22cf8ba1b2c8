package dataplane

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// onlyLoopback implements [Addresses] for a node without other addresses.
type onlyLoopback struct{ noAddresses }

func (onlyLoopback) Own() ([]netip.Addr, error) {
	return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}, nil
}

// greeter answers each connection with a byte and closes it.
func greeter(tb testing.TB) netip.AddrPort {
	tb.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(tb)
	tb.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				c.Write([]byte("x"))
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// atNodePort returns a Backend that serves NodePorts at 127.0.0.1, and the address of one in
// front of an endpoint.
func atNodePort(tb testing.TB, endpoint netip.AddrPort, c Config) (*Backend, netip.AddrPort) {
	tb.Helper()
	ports := must.Get(ruleset.ParseNodePortAddresses([]string{"localhost"}))(tb)
	tr := must.Get(tracker.New(tracker.Config{}))(tb)
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr, NodePortAddresses: ports}))(tb)
	c.Addresses = onlyLoopback{}
	c.Serves = func(f *ruleset.Frontend, _ v1.Protocol, _ netip.AddrPort) bool { return f.Kind == ruleset.KindNodePort }
	b := must.Get(New(c))(tb)
	tb.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		b.Shutdown(ctx)
	})
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), freePort(tb, "tcp"))
	unnamed, port := "", int32(endpoint.Port())
	tr.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
			Ports: []v1.ServicePort{{Port: 80, NodePort: int32(at.Port())}},
		},
	})
	tr.SetSlice(&discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "web", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &unnamed, Port: &port}},
		Endpoints:   []discovery.Endpoint{{Addresses: []string{endpoint.Addr().String()}}},
	})
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	must.Do(tb, e.Attach("loopback", b).Sync(tb.Context()))
	return b, at
}

func fetch(to netip.AddrPort) error {
	c, err := net.Dial("tcp", to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = io.ReadAll(c)
	return err
}

// TestServesRestrictsFrontends serves the NodePort of a Service and not its cluster IP.
func TestServesRestrictsFrontends(t *testing.T) {
	t.Parallel()
	b, at := atNodePort(t, greeter(t), Config{})
	if err := fetch(at); err != nil {
		t.Error(err)
	}
	if b.Stats().Sockets != 1 || b.Sockets(tracker.IPv4) != 1 || b.Sockets(tracker.IPv6) != 0 || !b.Listens(at, v1.ProtocolTCP) {
		t.Errorf("%+v, %d and %d sockets", b.Stats(), b.Sockets(tracker.IPv4), b.Sockets(tracker.IPv6))
	}
}

// BenchmarkLoopbackNodePort makes one connection after another to a NodePort at 127.0.0.1, and
// to its endpoint.
func BenchmarkLoopbackNodePort(b *testing.B) {
	endpoint := greeter(b)
	_, at := atNodePort(b, endpoint, Config{})
	for _, bm := range []struct {
		name string
		to   netip.AddrPort
	}{{"direct", endpoint}, {"nodeport", at}} {
		b.Run(bm.name, func(b *testing.B) {
			for b.Loop() {
				must.Do(b, fetch(bm.to))
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "conns/s")
		})
	}
}

// sockets is an Allowance.
type sockets struct{ room int }

func (s *sockets) Take() bool {
	if s.room == 0 {
		return false
	}
	s.room--
	return true
}

func (s *sockets) Give() { s.room++ }

// TestSocketsAreLimited has room for one socket, which the first Service keeps.
func TestSocketsAreLimited(t *testing.T) {
	t.Parallel()
	w, first, second := newWorld(t, Config{Sockets: &sockets{room: 1}}), freePort(t, "tcp"), freePort(t, "tcp")
	w.service("first", tcp, first)
	w.endpoints("first", tcp, serveTCP(t, "first"))
	w.sync()
	w.service("second", tcp, second)
	w.endpoints("second", tcp, serveTCP(t, "second"))
	for range 2 {
		err := w.cursor.Sync(t.Context())
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, ErrTooManySockets) {
			t.Fatalf("error %v", err)
		}
		w.connect(first)
	}
	w.endpoints("first", tcp)
	w.sync()
	if c := w.connect(second); c.name != "second" {
		t.Errorf("reached %q", c.name)
	}
}

// TestOldestServicesGetSockets has more Services than sockets when the process starts. The first two
// are the oldest, whatever their names.
func TestOldestServicesGetSockets(t *testing.T) {
	t.Parallel()
	w, ports := newWorld(t, Config{Sockets: &sockets{room: 2}}), map[string]uint16{}
	for name, created := range map[string]int64{"a": 0, "b": 400, "c": 200, "d": 300, "e": 500} {
		ports[name] = freePort(t, "tcp")
		w.created = created
		w.service(name, tcp, ports[name])
		w.endpoints(name, tcp, serveTCP(t, name))
	}
	var partial *ruleset.PartialError
	if err := w.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 3 {
		t.Fatalf("error %v", err)
	}
	for _, name := range []string{"c", "d"} {
		if c := w.connect(ports[name]); c.name != name {
			t.Errorf("%s is answered by %q", name, c.name)
		}
	}
}

// TestRefusedReportsWhatIsNotForwarded has an endpoint that does not listen.
func TestRefusedReportsWhatIsNotForwarded(t *testing.T) {
	t.Parallel()
	var refused atomic.Int64
	c := Config{Refused: func(proto v1.Protocol, at netip.AddrPort) {
		if proto == v1.ProtocolTCP && at.Addr().IsLoopback() {
			refused.Add(1)
		}
	}}
	w, port := newWorld(t, c), freePort(t, "tcp")
	w.service("web", tcp, port)
	w.endpoints("web", tcp, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), freePort(t, "tcp")))
	w.sync()
	for range 3 {
		if c, err := connect(port); err == nil {
			c.Close()
			t.Fatal("connected")
		}
	}
	eventually(t, "three connections are refused", func() bool { return refused.Load() == 3 })
}
