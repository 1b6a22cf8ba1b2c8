//go:build linux

package socketlb

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/examples/internal/threadcgroup"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A way is how a pod connects to another pod of the same node:
//
//   - bare: to the pod's own address, on a node without any rules;
//   - direct: to the pod's own address, on a node with the rules of package nftables;
//   - passing: as direct, but with the programs, which leave the connection alone;
//   - nftables: through a Service, by package nftables;
//   - socketlb: through a Service, by this package before nftables.
type way struct {
	name   string
	client *netlab.Host
	group  *threadcgroup.Group
	// connect is the address of a server that accepts and closes connections, and sink the
	// address of a server that reads blocks and answers each with a byte.
	connect, sink string
	// lookup is the address of a UDP server that answers each datagram.
	lookup string
}

const benchBlock = 8 << 20

// benchNetwork is a node that forwards between a client pod and a server pod.
func benchNetwork(b testing.TB) (node, client *netlab.Host) {
	lab, hosts := netlab.NewHosts(b, "node", "client", "server")
	node, client = hosts["node"], hosts["client"]
	node.Forward()
	for i, h := range []*netlab.Host{client, hosts["server"]} {
		dev := fmt.Sprint("veth", i)
		lab.Link(node, dev, h, "eth0")
		node.Addrs(dev, fmt.Sprintf("10.244.%d.1/24", i))
		h.Addrs("eth0", fmt.Sprintf("10.244.%d.2/24", i))
		h.Routes("", fmt.Sprintf("10.244.%d.1", i), "0.0.0.0/0")
	}
	hosts["server"].ServeTCP(b, "10.244.1.2:8080", func(net.Conn) {})
	hosts["server"].ServeTCP(b, "10.244.1.2:8081", func(c net.Conn) {
		buf := make([]byte, 1<<20)
		for {
			for n := 0; n < benchBlock; n += len(buf) {
				if _, err := io.ReadFull(c, buf); err != nil {
					return
				}
			}
			if _, err := c.Write(buf[:1]); err != nil {
				return
			}
		}
	})
	hosts["server"].Addrs("eth0", "10.244.1.3/24")
	for _, a := range []string{"10.244.1.2", "10.244.1.3"} {
		hosts["server"].ServeUDP(b, a+":8053", a)
	}
	return node, client
}

// benchWays sets up all ways with a number of Services.
func benchWays(b testing.TB, services int) []way {
	need(b)
	n := newNode(b)
	parent := must.Get(testCgroup())(b)
	outside := must.Get(parent.New())(b)
	b.Cleanup(func() { outside.Close() })
	_, bare := benchNetwork(b)
	node, client := benchNetwork(b)

	four := []tracker.Family{tracker.IPv4}
	rules := must.Get(nftables.New(b.Context(), nftables.Config{NetNS: node.File(), Families: four}))(b)
	b.Cleanup(func() { rules.Close() })
	c := n.config()
	c.NetNS, c.Families = node.File(), four
	sockets := must.Get(New(b.Context(), c))(b)
	b.Cleanup(func() { sockets.Close() })
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}, Families: four}))(b)
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr, LocalTraffic: ruleset.LocalTraffic{CIDRs: podCIDRs}}))(b)
	// The last Service leads to the server: port 80 to port 8080, and port 81 to port 8081.
	vip := func(i int) string { return netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String() }
	for i := range services {
		service := name(fmt.Sprint("service-", i))
		s := backendtest.Service(service, "web", vip(i+1), "fd00::1")
		slice := backendtest.Slice(service, "v4", tracker.IPv4, "web", v1.ProtocolTCP)
		for e := range 10 {
			k := i*10 + e
			slice.Endpoints = append(slice.Endpoints, backendtest.Endpoint(netip.AddrFrom4([4]byte{10, 128 + byte(k>>16), byte(k >> 8), byte(k)}).String(), "other"))
		}
		if i == services-1 {
			slice.Endpoints = []discovery.Endpoint{backendtest.Endpoint("10.244.1.2", "node")}
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "sink", Protocol: v1.ProtocolTCP, Port: 81})
			more := slice.DeepCopy()
			more.Name += "-sink"
			sink, port := "sink", int32(8081)
			more.Ports[0].Name, more.Ports[0].Port = &sink, &port
			tr.SetSlice(more)
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "dns", Protocol: v1.ProtocolUDP, Port: 53})
			dns := backendtest.Slice(service, "dns", tracker.IPv4, "dns", v1.ProtocolUDP,
				backendtest.Endpoint("10.244.1.2", "node"), backendtest.Endpoint("10.244.1.3", "node"))
			*dns.Ports[0].Port = 8053
			tr.SetSlice(dns)
		}
		tr.SetService(s)
		tr.SetSlice(slice)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	for _, cursor := range []*ruleset.Cursor{engine.Attach("nftables", rules), engine.Attach("socketlb", sockets)} {
		must.Do(b, cursor.Sync(context.Background()))
	}
	own, last := "10.244.1.2", vip(services)
	b.Cleanup(func() {
		_, all := b.(*testing.B) // a test may use one way alone
		if n, err := countersOf(sockets); err != nil || all && n.Pods == 0 || n.Node != 0 {
			b.Errorf("counters: %+v, %v", n, err)
		}
	})
	return []way{
		{"bare", bare, outside, own + ":8080", own + ":8081", own + ":8053"},
		{"direct", client, outside, own + ":8080", own + ":8081", own + ":8053"},
		{"passing", client, n.Group, own + ":8080", own + ":8081", own + ":8053"},
		{"nftables", client, outside, last + ":80", last + ":81", last + ":53"},
		{"socketlb", client, n.Group, last + ":80", last + ":81", last + ":53"},
	}
}

// compare runs the ways in turns, in another order each round. It reports the median rate of
// each way, its percentage of the rates of direct and of bare, and the 95 % confidence
// interval of the first percentage (the notch of a box plot, as in BenchmarkConnections of
// package nftables).
func compare(b *testing.B, ways []way, unit string, amount float64, run func(way) error) {
	took := map[string][]float64{}
	for b.Loop() {
		for _, at := range rand.Perm(len(ways)) {
			w := ways[at]
			must.Do(b, w.group.Do(func() error {
				return w.client.Do(func() error {
					start := time.Now()
					err := run(w)
					took[w.name] = append(took[w.name], time.Since(start).Seconds())
					return err
				})
			}))
		}
	}
	b.ReportMetric(0, "ns/op")
	quantile := func(list []float64, q float64) float64 {
		list = slices.Sorted(slices.Values(list))
		return list[int(q*float64(len(list)-1))]
	}
	for _, w := range ways {
		b.ReportMetric(amount/quantile(took[w.name], 0.5), w.name+"-"+unit+"/s")
		for _, to := range []string{"direct", "bare"} {
			if w.name == to || w.name == "bare" {
				continue
			}
			var ratio []float64
			for round, seconds := range took[to] {
				ratio = append(ratio, seconds/took[w.name][round])
			}
			b.ReportMetric(100*quantile(ratio, 0.5), w.name+"-%-of-"+to)
			if to == "direct" {
				b.ReportMetric(157*(quantile(ratio, 0.75)-quantile(ratio, 0.25))/math.Sqrt(float64(len(ratio))), w.name+"-off-%")
			}
		}
	}
}

// BenchmarkConnections opens and resets connections, one after another.
func BenchmarkConnections(b *testing.B) {
	for _, services := range []int{10, 10000} {
		b.Run(fmt.Sprint("services=", services), func(b *testing.B) {
			const batch = 50
			compare(b, benchWays(b, services), "connections", batch, func(w way) error {
				for range batch {
					c, err := net.Dial("tcp", w.connect)
					if err != nil {
						return err
					}
					_ = c.(*net.TCPConn).SetLinger(0)
					c.Close()
				}
				return nil
			})
		})
	}
}

// BenchmarkLookups makes look-ups as a resolver does, one after another: a new socket, two
// datagrams, two answers. One way connects the socket, and the other one does not.
func BenchmarkLookups(b *testing.B) {
	for _, connected := range []bool{true, false} {
		b.Run(fmt.Sprint("connected=", connected), func(b *testing.B) {
			const batch = 50
			compare(b, benchWays(b, 10), "lookups", batch, func(w way) error {
				for range batch {
					if _, err := lookup(w.lookup, connected, false, testtime.Timeout); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

// BenchmarkThroughput sends blocks over an established connection.
func BenchmarkThroughput(b *testing.B) {
	for _, services := range []int{10, 10000} {
		b.Run(fmt.Sprint("services=", services), func(b *testing.B) {
			ways, out, in := benchWays(b, services), make([]byte, 1<<20), make([]byte, 1)
			open := map[string]net.Conn{}
			for _, w := range ways {
				must.Do(b, w.group.Do(func() (err error) {
					open[w.name], err = w.client.Dial(context.Background(), "tcp", "", w.sink)
					return err
				}))
				defer open[w.name].Close()
			}
			compare(b, ways, "MB", benchBlock/1e6, func(w way) error {
				for range benchBlock / len(out) {
					if _, err := open[w.name].Write(out); err != nil {
						return err
					}
				}
				_, err := io.ReadFull(open[w.name], in)
				return err
			})
		})
	}
}
