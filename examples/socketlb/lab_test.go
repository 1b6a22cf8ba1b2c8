//go:build linux

package socketlb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/threadcgroup"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// lab is a node and a pod, both linked to a host that has all endpoints. No backend is behind
// the Backend, and no route leads to a Service: a connection that is left alone fails.
type lab struct {
	testing.TB
	*node
	nodeNS, pod *netlab.Host
	backend     *Backend
	tracker     *tracker.Tracker
	engine      *ruleset.Engine
	cursor      *ruleset.Cursor
}

const (
	nodeAddr4, nodeAddr6 = "192.0.2.1", "2001:db8:1::1"
	secondAddr4          = "192.0.2.7" // an address of the node that the Node object lacks
)

// endpoints4 and endpoints6 are the addresses of the endpoints. The first one is on the node.
var (
	endpoints4 = []string{"10.244.9.1", "10.244.9.2", "10.244.9.3"}
	endpoints6 = []string{"fd00:10:244:9::1", "fd00:10:244:9::2", "fd00:10:244:9::3"}
	podCIDRs   = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}
)

func newLab(tb testing.TB, edit func(*Config, *ruleset.Config)) *lab {
	tb.Helper()
	need(tb)
	l := &lab{TB: tb, node: newNode(tb)}
	network, hosts := netlab.NewHosts(tb, "node", "pod", "server")
	l.nodeNS, l.pod = hosts["node"], hosts["pod"]
	server := hosts["server"]
	network.Link(l.nodeNS, "eth0", server, "eth0")
	network.Link(l.pod, "eth0", server, "eth1")
	l.nodeNS.Addrs("eth0", nodeAddr4+"/24", secondAddr4+"/24", nodeAddr6+"/64")
	server.Addrs("eth0", "192.0.2.2/24", "2001:db8:1::2/64")
	l.pod.Addrs("eth0", "10.244.1.2/24", "fd00:10:244:1::2/64")
	server.Addrs("eth1", "10.244.1.1/24", "fd00:10:244:1::1/64")
	for _, a := range append(append([]string(nil), endpoints4...), endpoints6...) {
		addr := netip.MustParseAddr(a)
		server.Addrs("lo", netip.PrefixFrom(addr, addr.BitLen()).String())
		for _, port := range []uint16{8080, 8081} {
			at := netip.AddrPortFrom(addr, port).String()
			server.ServeTCP(tb, at, func(net.Conn) {})
			server.ServeUDP(tb, at, at)
		}
	}
	l.nodeNS.Routes("", "192.0.2.2", "10.244.9.0/24")
	l.nodeNS.Routes("", "2001:db8:1::2", "fd00:10:244:9::/64")
	l.pod.Routes("", "10.244.1.1", "10.244.9.0/24")
	l.pod.Routes("", "fd00:10:244:1::1", "fd00:10:244:9::/64")
	c := l.config()
	rules := ruleset.Config{LocalTraffic: ruleset.LocalTraffic{CIDRs: podCIDRs}}
	if edit != nil {
		edit(&c, &rules)
	}
	l.tracker = must.Get(tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr(nodeAddr4), netip.MustParseAddr(nodeAddr6)}},
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			if s.Labels["hash"] != "" {
				p.Hash = tracker.HashSource
			}
			return nil
		},
	}))(tb)
	rules.Source = l.tracker
	l.engine = must.Get(ruleset.NewEngine(rules))(tb)
	l.start(c)
	l.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return l
}

// start opens a Backend and attaches it to the ruleset.
func (l *lab) start(c Config) {
	l.Helper()
	if c.NetNS = l.nodeNS.File(); l.cursor != nil {
		l.cursor.Detach()
	}
	b := must.Get(New(l.Context(), c))(l)
	l.Cleanup(func() { b.Close() })
	l.backend, l.cursor = b, l.engine.Attach("socketlb", b)
}

func name(s string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: s} }

// set hands in a Service with a number of endpoints in each family.
func (l *lab) set(service string, ip int, endpoints int, edits ...func(*v1.Service)) {
	l.tracker.SetService(backendtest.Service(name(service), "web", vip4(ip).String(), vip6(ip).String(), edits...))
	proto := v1.ProtocolTCP
	if s := backendtest.Service(name(service), "web", "", "", edits...); s.Spec.Ports[0].Protocol != "" {
		proto = s.Spec.Ports[0].Protocol
	}
	for f, list := range map[tracker.Family][]string{tracker.IPv4: endpoints4, tracker.IPv6: endpoints6} {
		var eps []discovery.Endpoint
		for i, a := range list[:endpoints] {
			eps = append(eps, backendtest.Endpoint(a, []string{"node", "other", "third"}[i]))
		}
		l.tracker.SetSlice(backendtest.Slice(name(service), f.String(), f, "web", proto, eps...))
	}
}

func vip4(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, 0, byte(n)}) }
func vip6(n int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, 0, 0x96, 15: byte(n)})
}

func (l *lab) sync() {
	l.Helper()
	must.Do(l, l.cursor.Sync(l.Context()))
	must.Do(l, l.backend.Check(l.Context()))
}

// dial connects from a host of the node. The source may be "".
func (l *lab) dial(h *netlab.Host, network, from, to string) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(l.Context(), testtime.Timeout)
	defer cancel()
	err = l.Do(func() (err error) {
		c, err = h.Dial(ctx, network, from, to)
		return err
	})
	return c, err
}

// server connects and returns the endpoint, or "" if the connection was left alone.
func (l *lab) server(h *netlab.Host, from, to string) string {
	l.Helper()
	before := l.counters()
	c, err := l.dial(h, "tcp", from, to)
	after := l.counters()
	taken := after.Node + after.Pods - before.Node - before.Pods
	if err != nil {
		if taken != 0 {
			l.Errorf("%s to %s: counted, but %v", h.Name, to, err)
		}
		return ""
	}
	defer c.Close()
	if own := after.Node - before.Node; taken != 1 || (own == 1) != (h == l.nodeNS) {
		l.Errorf("%s to %s: counters were %+v and are %+v", h.Name, to, before, after)
	}
	// The process gets the Service's address, but the peer is the endpoint.
	if c.RemoteAddr().String() != to {
		l.Errorf("%s to %s: getpeername returns %s", h.Name, to, c.RemoteAddr())
	}
	p, err := storedPeer(l.backend, c)
	if err != nil || p.Service.String() != to {
		l.Errorf("%s to %s: the socket's peer is %v, %v", h.Name, to, p, err)
	}
	return p.Endpoint.String()
}

// frontends returns how many frontends are in the map.
func (l *lab) frontends() int {
	l.Helper()
	return len(must.Get(readMap[frontendKey, frontendValue](l.backend.maps["frontends"]))(l))
}

func (l *lab) counters() connections {
	l.Helper()
	return must.Get(countersOf(l.backend))(l)
}

// countersOf returns the sums over all Services.
func countersOf(b *Backend) (sum connections, err error) {
	all, err := readConnections(b.maps[connectionsFile])
	for _, n := range all {
		sum.Node += n.Node
		sum.Pods += n.Pods
	}
	return sum, err
}

// reaches connects and returns how often each endpoint was reached.
func (l *lab) reaches(h *netlab.Host, from, to string, times int) map[string]int {
	out := map[string]int{}
	for range times {
		out[l.server(h, from, to)]++
	}
	return out
}

// until calls f until it returns true.
func until(tb testing.TB, what string, f func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(testtime.Timeout); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatal("not in time: ", what)
		}
	}
}

// privileged returns an error if this process may not load programs, which needs capabilities
// in the initial user namespace.
var privileged = sync.OnceValue(func() error {
	dir, closeDir, err := TemporaryDir()
	if err != nil {
		return err
	}
	defer closeDir()
	return Probe(context.Background(), Config{Dir: dir})
})

func TestMain(m *testing.M) {
	confine.Roles{"probe": func() error {
		return Probe(context.Background(), Config{Dir: os.Getenv("PROBE_DIR"), Cgroup: os.Getenv("PROBE_CGROUP")})
	}}.Enter()
	if privileged() == nil {
		// No process in the user namespace that conformance.Main creates may load programs.
		os.Setenv(netlab.InsideEnv, "1")
		netlab.Parallel(4) // worlds wait for packets that must not arrive
		code := m.Run()
		if p, err := testCgroup(); err == nil {
			if err := p.Close(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = max(code, 1)
			}
		}
		os.Exit(code)
	}
	conformance.Main(m)
}

// need skips the test without privileges.
func need(tb testing.TB) {
	tb.Helper()
	err := privileged()
	netlab.Need(tb, err == nil, fmt.Sprintf("the right to load BPF programs: %v", err))
	netlab.Require(tb)
}

// node is the cgroup of a world's processes, and the folder of its maps.
type node struct {
	*threadcgroup.Group
	dir string
}

// newNode creates a cgroup, to which single threads of this process are moved.
func newNode(tb testing.TB) *node {
	tb.Helper()
	parent := must.Get(testCgroup())(tb)
	dir, closeDir, err := TemporaryDir()
	must.Do(tb, err)
	group := must.Get(parent.New())(tb)
	n := &node{group, dir}
	tb.Cleanup(func() {
		if err := errors.Join(Cleanup(context.Background(), n.config()), closeDir(), group.Close()); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// config has room for what a test needs: the kernel allocates the maps in advance.
func (n *node) config() Config {
	return Config{Cgroup: n.Path(), Dir: n.dir, connections: 1 << 12, clients: 1 << 10}
}

// testCgroup is this process's cgroup, which contains the cgroups of all nodes.
var testCgroup = sync.OnceValues(func() (*threadcgroup.Parent, error) {
	root, err := RootCgroup()
	if err != nil {
		return nil, err
	}
	return threadcgroup.NewParent(root)
})
