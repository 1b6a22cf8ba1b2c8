package dataplane

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// ways runs a benchmark for three ways from a process on a node to a local pod: to the pod's
// own address, to a cluster IP in nftables, and through this package. do runs a function on
// the node, and to is the address to connect to.
func ways(b *testing.B, bench func(b *testing.B, do func(func() error) error, to string)) {
	planes := map[string]func(testing.TB, conformance.Env) ruleset.Backend{
		"direct": func(testing.TB, conformance.Env) ruleset.Backend {
			return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
		},
		"nftables": func(tb testing.TB, env conformance.Env) ruleset.Backend {
			n, err := nftables.New(tb.Context(), nftables.Config{NetNS: env.NetNS})
			if err != nil {
				tb.Skip(err)
			}
			tb.Cleanup(func() { n.Close() })
			return n
		},
		"userspace": func(tb testing.TB, env conformance.Env) ruleset.Backend { return inWorld(tb, env, Config{}) },
	}
	for _, way := range []string{"direct", "nftables", "userspace"} {
		b.Run("way="+way, func(b *testing.B) {
			w := conformance.NewWorld(b, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: planes[way]})
			pods, name, cluster := w.Pods()[:3], "http", netip.MustParseAddrPort("10.96.0.10:80")
			port := int32(pods[0].Ports()[0])
			w.Tracker.SetService(&v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
				Spec:       v1.ServiceSpec{ClusterIP: cluster.Addr().String(), Ports: []v1.ServicePort{{Name: name, Port: int32(cluster.Port())}}},
			})
			slice := &discovery.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
				AddressType: discovery.AddressTypeIPv4,
				Ports:       []discovery.EndpointPort{{Name: &name, Port: &port}},
			}
			for _, p := range pods {
				slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{p.Addr(tracker.IPv4).String()}, NodeName: &p.Node})
			}
			w.Tracker.SetSlice(slice)
			w.Sync()
			to := cluster
			if way == "direct" {
				to = netip.AddrPortFrom(pods[0].Addr(tracker.IPv4), uint16(port))
			}
			bench(b, w.Do, to.String())
		})
	}
}

// open opens a connection and reads the endpoint's greeting.
func open(to string) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: testtime.Timeout}
	conn, err := d.DialContext(context.Background(), "tcp", to)
	if err != nil {
		return nil, err
	}
	c := conn.(*net.TCPConn)
	c.SetLinger(0) // Close resets the connection, so no socket stays in TIME_WAIT
	buf := make([]byte, 100)
	if _, err := c.Read(buf); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// BenchmarkConnections makes connections from four clients at a time. Each opens a
// connection, reads a greeting and resets the connection.
func BenchmarkConnections(b *testing.B) {
	ways(b, func(b *testing.B, do func(func() error) error, to string) {
		const clients = 4
		next := make(chan struct{}, 64)
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				if err := do(func() error {
					for range next {
						c, err := open(to)
						if err != nil {
							b.Error(err)
							continue
						}
						c.Close()
					}
					return nil
				}); err != nil {
					b.Error(err)
				}
			})
		}
		for b.Loop() {
			next <- struct{}{}
		}
		close(next)
		wg.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "connections/s")
	})
}

// BenchmarkThroughput sends blocks over one connection to an endpoint that echoes them.
func BenchmarkThroughput(b *testing.B) {
	const block = 1 << 20
	ways(b, func(b *testing.B, do func(func() error) error, to string) {
		var c *net.TCPConn
		must.Do(b, do(func() (err error) {
			c, err = open(to)
			return err
		}))
		defer c.Close()
		b.SetBytes(block)
		out, in := make([]byte, block), make([]byte, block)
		for b.Loop() {
			failed := make(chan error, 1)
			go func() {
				_, err := c.Write(out)
				failed <- err
			}()
			must.Get(io.ReadFull(c, in))(b)
			must.Do(b, <-failed)
		}
	})
}
