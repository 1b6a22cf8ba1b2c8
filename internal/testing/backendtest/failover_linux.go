package backendtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// Failover has two nodes that both announce an external IP, as by BGP, and a router that
// prefers one of them. It checks by packets that a node without an endpoint passes packets on
// to the other one, that they come back to it when it has an endpoint, and what happens to
// open connections.
//
//	client --- router --- a --- podA
//	             |        |
//	             +------- b --- podB
func Failover(t *testing.T, open func(testing.TB, conformance.Env) ruleset.Backend, o FailoverOptions) {
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		for _, local := range []bool{true, false} {
			// Without the policy Local each node is a cluster of its own.
			t.Run(fmt.Sprintf("%s/policy Local %v", f, local), func(t *testing.T) {
				t.Parallel()
				failover(t, f, local, open, o)
			})
		}
	}
}

// FailoverOptions holds what differs between backends.
type FailoverOptions struct {
	// Ends means that open connections end when a node begins to let packets pass, and
	// those that passed it when it gets an endpoint.
	Ends bool
	// Liberal sets nf_conntrack_tcp_be_liberal on the nodes, for a backend that otherwise
	// drops packets of connections of which the node sees one direction.
	Liberal bool
}

// failoverNode is a node with its objects.
type failoverNode struct {
	*netlab.Host
	name     string
	pod      netip.Addr
	pipeline *Pipeline
	cursor   *ruleset.Cursor
}

// failoverWorld is the world of Failover in one family.
type failoverWorld struct {
	*testing.T
	family         tracker.Family
	client, router *netlab.Host
	a, b           *failoverNode
	vip            netip.AddrPort
	local          bool
}

func (w *failoverWorld) addr(format4, format6 string, n ...any) netip.Addr {
	format := format4
	if w.family == tracker.IPv6 {
		format = format6
	}
	return netip.MustParseAddr(fmt.Sprintf(format, n...))
}

// link returns an address of a link.
func (w *failoverWorld) link(number, end int) netip.Addr {
	return w.addr("10.%d.0.%d", "fd00:%d::%d", number, end)
}

func (w *failoverWorld) must(errs ...error) {
	w.Helper()
	if err := errors.Join(errs...); err != nil {
		w.Fatal(err)
	}
}

// join links two hosts, with the ends 1 and 2.
func (w *failoverWorld) join(lab *netlab.Lab, number int, x *netlab.Host, ifx string, y *netlab.Host, ify string) {
	w.Helper()
	lan := func(end int) netip.Prefix {
		a := w.link(number, end)
		return netip.PrefixFrom(a, a.BitLen()/4*3)
	}
	lab.Link(x, ifx, y, ify)
	w.must(x.AddAddr(ifx, lan(1)), y.AddAddr(ify, lan(2)))
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// newFailover builds the network and starts a backend on each node.
func newFailover(t *testing.T, f tracker.Family, local, liberal bool, open func(testing.TB, conformance.Env) ruleset.Backend) *failoverWorld {
	t.Helper()
	w := &failoverWorld{T: t, family: f, local: local}
	lab, hosts := netlab.NewHosts(t, "client", "router", "a", "b", "podA", "podB")
	w.client, w.router = hosts["client"], hosts["router"]
	w.vip = netip.AddrPortFrom(w.addr("203.0.113.10", "2001:db8::10"), 80)
	for _, name := range []string{"router", "a", "b"} {
		hosts[name].Forward()
		w.must(hosts[name].Sysctl("net/ipv4/conf/all/send_redirects", "0"), hosts[name].Sysctl("net/ipv4/conf/all/rp_filter", "0"))
		if liberal && name != "router" {
			w.must(hosts[name].Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1"))
		}
	}
	w.join(lab, 1, w.router, "client", w.client, "eth0")
	w.join(lab, 2, w.router, "a", hosts["a"], "eth0")
	w.join(lab, 3, w.router, "b", hosts["b"], "eth0")
	w.join(lab, 4, hosts["a"], "peer", hosts["b"], "peer")
	w.join(lab, 5, hosts["a"], "pod", hosts["podA"], "eth0")
	w.join(lab, 6, hosts["b"], "pod", hosts["podB"], "eth0")
	everything := netip.PrefixFrom(w.addr("0.0.0.0", "::"), 0)
	w.must(
		w.client.AddRoute(everything, w.link(1, 1), ""),
		hosts["a"].AddRoute(everything, w.link(2, 1), ""),
		hosts["b"].AddRoute(everything, w.link(3, 1), ""),
		hosts["podA"].AddRoute(everything, w.link(5, 1), ""),
		hosts["podB"].AddRoute(everything, w.link(6, 1), ""),
		hosts["a"].AddRoute(single(w.link(6, 2)), w.link(4, 2), ""),
		hosts["b"].AddRoute(single(w.link(5, 2)), w.link(4, 1), ""),
		// Each node has a route to the address through the other one.
		hosts["a"].AddRoute(single(w.vip.Addr()), w.link(4, 2), ""),
		hosts["b"].AddRoute(single(w.vip.Addr()), w.link(4, 1), ""))
	w.prefer(w.link(2, 2))
	start := func(name string, link, pod int) *failoverNode {
		n := &failoverNode{Host: hosts[name], name: name, pod: w.link(pod, 2)}
		p, err := NewPipeline(tracker.Config{
			Node: tracker.NodeInfo{Name: name, Addresses: []netip.Addr{w.link(link, 2)}}, Families: []tracker.Family{f},
			OnService: func(_ *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
				p.PassWithoutEndpoints = true
				return nil
			},
		}, ruleset.Config{})
		w.must(err)
		n.pipeline = p
		n.cursor = p.Engine.Attach(name, open(t, conformance.Env{NetNS: n.File(), Families: []tracker.Family{f}}))
		w.serve(hosts[map[string]string{"a": "podA", "b": "podB"}[name]], n)
		for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			s := Service(failoverName(protocol), "p", "10.96.0.10", "fd00:96::10", func(s *v1.Service) {
				s.Spec.ExternalIPs = []string{w.vip.Addr().String()}
				s.Spec.Ports[0].Protocol = protocol
				if local {
					s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
				}
			})
			p.Tracker.SetService(s)
		}
		return n
	}
	w.a, w.b = start("a", 2, 5), start("b", 3, 6)
	return w
}

func failoverName(p v1.Protocol) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: "web-" + string(p)}
}

// serve answers with the name of the node, and then echoes.
func (w *failoverWorld) serve(pod *netlab.Host, n *failoverNode) {
	at := netip.AddrPortFrom(n.pod, 8080).String()
	pod.ServeUDP(w, at, n.name)
	pod.ServeTCP(w, at, func(c net.Conn) {
		if _, err := io.WriteString(c, n.name); err == nil {
			_, _ = io.Copy(c, c)
		}
	})
}

// prefer makes the router send packets to the address by way of a node.
func (w *failoverWorld) prefer(via netip.Addr) {
	w.Helper()
	w.must(w.router.AddRoute(single(w.vip.Addr()), via, ""))
}

// endpoints makes the pods of the named nodes the endpoints, and waits until both nodes have
// that.
func (w *failoverWorld) endpoints(a, b bool) {
	w.Helper()
	for _, n := range []*failoverNode{w.a, w.b} {
		for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			var list []discovery.Endpoint
			for _, o := range []*failoverNode{w.a, w.b} {
				if (o == w.a && a || o == w.b && b) && (w.local || n == o) {
					list = append(list, Endpoint(o.pod.String(), o.name))
				}
			}
			n.pipeline.Tracker.SetSlice(Slice(failoverName(protocol), "1", w.family, "p", protocol, list...))
		}
		w.must(n.cursor.Sync(w.Context()))
	}
}

const failoverWait = 5 * time.Second

// dial opens a connection and returns it with the node that answers.
func (w *failoverWorld) dial(network string) (net.Conn, string, error) {
	ctx, cancel := context.WithTimeout(w.Context(), failoverWait)
	defer cancel()
	c, err := w.client.Dial(ctx, network, "", w.vip.String())
	if err != nil {
		return nil, "", err
	}
	w.Cleanup(func() { c.Close() })
	w.must(c.SetDeadline(time.Now().Add(failoverWait)))
	buf := make([]byte, 16)
	if network == "udp" {
		if _, err := c.Write([]byte("x")); err != nil {
			return nil, "", err
		}
	}
	n, err := c.Read(buf)
	return c, string(buf[:n]), err
}

// reaches checks which node answers new connections, and returns an open one.
func (w *failoverWorld) reaches(want string) net.Conn {
	w.Helper()
	if _, got, err := w.dial("udp"); err != nil || got != want {
		w.Errorf("UDP: node %q answered (%v), want %q", got, err, want)
	}
	c, got, err := w.dial("tcp")
	if err != nil || got != want {
		w.Fatalf("TCP: node %q answered (%v), want %q", got, err, want)
	}
	return c
}

// alive reports whether an open connection still works.
func (w *failoverWorld) alive(c net.Conn) error {
	w.must(c.SetDeadline(time.Now().Add(failoverWait)))
	if _, err := c.Write([]byte("echo")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 4))
	return err
}

func failover(t *testing.T, f tracker.Family, local bool, open func(testing.TB, conformance.Env) ruleset.Backend, o FailoverOptions) {
	w := newFailover(t, f, local, o.Liberal, open)
	keeps := func(c net.Conn, what string) {
		t.Helper()
		if err := w.alive(c); err != nil && !o.Ends {
			t.Errorf("%s: %v", what, err)
		}
	}
	w.endpoints(true, true)
	toA := w.reaches("a")

	// Node a loses its endpoint. New connections pass it. The open one was translated and
	// lives as long as its pod.
	w.endpoints(false, true)
	passed := w.reaches("b")
	keeps(toA, "translated connection, after its endpoint left")

	// The endpoint comes back.
	w.endpoints(true, true)
	w.reaches("a")
	keeps(toA, "translated connection, after its endpoint came back")
	keeps(passed, "passed connection, after the node got an endpoint")

	// The router turns to node b, which does not know the connection. It takes the packet for
	// the first of a new connection, and an endpoint that does not know it either resets it.
	w.prefer(w.link(3, 2))
	w.reaches("b")
	if err := w.alive(toA); !errors.Is(err, syscall.ECONNRESET) && !o.Ends {
		t.Errorf("connection to a node that has an endpoint, by another node: %v, want a reset", err)
	}

	// The other direction: node b passes packets on to node a.
	toB := w.reaches("b")
	w.endpoints(true, false)
	passed = w.reaches("a")
	keeps(toB, "translated connection, other direction")
	// The router turns to node a, which handles the connection that passed b already.
	w.prefer(w.link(2, 2))
	keeps(passed, "passed connection, after the router turned to its node")
	w.reaches("a")

	// No node has an endpoint: the packet goes round until its hop limit ends it, and no host
	// answers.
	w.endpoints(false, false)
	if _, got, err := w.dial("tcp"); err == nil || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("without endpoints: answer %q, %v", got, err)
	}
	w.endpoints(false, true)
	w.reaches("b")
}
