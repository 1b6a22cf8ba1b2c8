package reset

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// site is a node with a client and two pods, each behind a link of its own.
type site struct {
	t      *testing.T
	hosts  map[string]*netlab.Host
	pipe   *backendtest.Pipeline
	cursor *ruleset.Cursor
	reset  *Resetter
}

func (s *site) addr(pod string, f tracker.Family) netip.Addr {
	n := map[string]int{"client": 1, "pod1": 2, "pod2": 3}[pod]
	if f == tracker.IPv6 {
		return netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%d::2", n))
	}
	return netip.MustParseAddr(fmt.Sprintf("10.244.%d.2", n))
}

// newSite starts the node's data plane, and a Resetter whose delay is a moment.
func newSite(t *testing.T, c Config) *site {
	t.Helper()
	t.Parallel()
	s := &site{t: t}
	var lab *netlab.Lab
	lab, s.hosts = netlab.NewHosts(t, "node", "client", "pod1", "pod2")
	node := s.hosts["node"]
	node.Forward()
	for i, name := range []string{"client", "pod1", "pod2"} {
		h, n := s.hosts[name], i+1
		lab.Link(node, name, h, "eth0")
		node.Addrs(name, fmt.Sprintf("10.244.%d.1/24", n), fmt.Sprintf("fd00:10:244:%d::1/64", n))
		h.Addrs("eth0", fmt.Sprintf("10.244.%d.2/24", n), fmt.Sprintf("fd00:10:244:%d::2/64", n))
		h.Routes("", fmt.Sprintf("10.244.%d.1", n), "0.0.0.0/0")
		h.Routes("", fmt.Sprintf("fd00:10:244:%d::1", n), "::/0")
	}
	// The node's own connections to Services need a route.
	node.Routes("", "10.244.1.2", "0.0.0.0/0")
	node.Routes("", "fd00:10:244:1::2", "::/0")
	for _, name := range []string{"pod1", "pod2"} {
		s.hosts[name].ServeTCP(t, "[::]:8080", func(c net.Conn) {
			defer c.Close()
			for buf := make([]byte, 64); ; {
				if _, err := c.Read(buf); err != nil {
					return
				}
				c.Write([]byte(name))
			}
		})
	}
	c.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	s.pipe = backendtest.NewNode(t, tracker.Config{OnService: worldgen.OnService})
	plane := must.Get(nftables.New(t.Context(), nftables.Config{NetNS: node.File()}))(t)
	t.Cleanup(func() { plane.Close() })
	c.NetNS, c.Delay = node.File(), time.Millisecond
	c.Exists = func(a netip.AddrPort) bool { return len(s.cursor.LookupEndpoint(a, v1.ProtocolTCP)) != 0 }
	s.reset = must.Get(New(t.Context(), c))(t)
	t.Cleanup(func() { s.reset.Close() })
	s.cursor = s.pipe.Engine.Attach("plane", s.reset.Wrap(plane))
	s.service("web", "10.96.0.1", "fd00:10:96::1", backendtest.NodePort(30080))
	s.endpoints("web", ready("pod1"), ready("pod2"))
	return s
}

func name(service string) types.NamespacedName {
	return types.NamespacedName{Namespace: "shop", Name: service}
}

func (s *site) service(service, v4, v6 string, edits ...func(*v1.Service)) {
	s.pipe.Tracker.SetService(backendtest.Service(name(service), "p", v4, v6, edits...))
}

// state is a pod as an endpoint.
type state struct {
	pod                  string
	terminating, serving bool
	// failed is a pod that is neither ready nor serving nor terminating.
	failed bool
}

func ready(pod string) state { return state{pod: pod} }

// endpoints sets the endpoints of a Service and syncs.
func (s *site) endpoints(service string, pods ...state) {
	s.t.Helper()
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		var eps []discovery.Endpoint
		for _, p := range pods {
			ep := backendtest.Endpoint(s.addr(p.pod, f).String(), "elsewhere")
			if p.terminating || p.failed {
				no := false
				ep.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &p.serving, Terminating: &p.terminating}
			}
			eps = append(eps, ep)
		}
		s.pipe.Tracker.SetSlice(backendtest.Slice(name(service), f.String(), f, "p", v1.ProtocolTCP, eps...))
	}
	must.Do(s.t, s.cursor.Sync(s.t.Context()))
}

// silence makes a pod drop every packet, as if its node had lost power, or ends that.
func (s *site) silence(pod string, on bool) {
	s.t.Helper()
	commands := "delete table inet test"
	if on {
		commands = "table inet test {\nchain in {\ntype filter hook prerouting priority -300; policy accept;\ndrop\n}\n}"
	}
	b := must.Get(transaction(commands))(s.t)
	conn := s.dial(pod)
	defer conn.Close()
	must.Do(s.t, conn.Commit(&b.Batch))
}

// dial opens a netlink socket in a host.
func (s *site) dial(host string) *nfnl.Conn {
	s.t.Helper()
	return must.Get(nfnl.Dial(s.hosts[host].File()))(s.t)
}

// conn opens connections from a host until one goes to the pod.
func (s *site) conn(from, to, pod string) net.Conn {
	s.t.Helper()
	for range 100 {
		ctx, cancel := context.WithTimeout(s.t.Context(), testtime.Timeout)
		c, err := s.hosts[from].Dial(ctx, "tcp", "", to)
		cancel()
		if err != nil {
			s.t.Fatalf("%s to %s: %v", from, to, err)
		}
		s.t.Cleanup(func() { c.Close() })
		if got, err := ask(c); err != nil {
			s.t.Fatal(err)
		} else if got == pod {
			return c
		}
	}
	s.t.Fatalf("no connection from %s to %s reached %s", from, to, pod)
	return nil
}

// ask sends a request and returns the answer.
func ask(c net.Conn) (string, error) {
	if err := c.SetDeadline(time.Now().Add(testtime.Timeout)); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("who?")); err != nil {
		return "", err
	}
	buf := make([]byte, 64)
	n, err := c.Read(buf)
	return string(buf[:n]), err
}

// write writes what is due.
func (s *site) write() {
	s.t.Helper()
	time.Sleep(2 * s.reset.config.Delay)
	s.reset.step(s.t.Context())
}

// pairs returns the number of pairs in the kernel.
func (s *site) pairs() int {
	s.t.Helper()
	return len(must.Get(s.reset.table.list(s.t.Context()))(s.t))
}

// destinations are addresses of the Service web.
var destinations = []string{"10.96.0.1:80", "[fd00:10:96::1]:80", "10.244.1.1:30080", "[fd00:10:244:1::1]:30080"}

func TestConnectionsToVanishedEndpointEnd(t *testing.T) {
	s := newSite(t, Config{})
	type open struct {
		what    string
		c       net.Conn
		survive bool
	}
	var list []open
	for _, to := range destinations {
		for _, from := range []string{"client", "node"} {
			list = append(list,
				open{from + " to " + to + ", vanished", s.conn(from, to, "pod1"), false},
				open{from + " to " + to + ", other endpoint", s.conn(from, to, "pod2"), true})
		}
	}
	direct := s.conn("client", "10.244.2.2:8080", "pod1")
	s.silence("pod1", true)
	s.endpoints("web", ready("pod2"))
	s.write()
	if n := s.pairs(); n != len(destinations) {
		t.Errorf("%d pairs, want one for each destination, whatever the number of connections", n)
	}
	for _, o := range list {
		switch got, err := ask(o.c); {
		case o.survive && (err != nil || got != "pod2"):
			t.Errorf("%s: %q, %v", o.what, got, err)
		case !o.survive && !errors.Is(err, unix.ECONNRESET):
			t.Errorf("%s: %q, %v, want a reset", o.what, got, err)
		}
	}
	// A connection that does not use the Service is not touched.
	s.silence("pod1", false)
	if got, err := ask(direct); got != "pod1" || err != nil {
		t.Errorf("direct connection: %q, %v", got, err)
	}
}

// TestHalfOpenConnectionsEnd has connections whose endpoint is gone before it answers the first packet.
func TestHalfOpenConnectionsEnd(t *testing.T) {
	s := newSite(t, Config{})
	s.endpoints("web", ready("pod1"))
	ended, n := map[string]chan error{}, 0
	for _, to := range destinations[:2] {
		s.conn("node", to, "pod1") // so that the node has the pod's link-layer address
		n++
	}
	s.silence("pod1", true)
	for _, to := range destinations {
		for _, from := range []string{"client", "node"} {
			c := make(chan error, 1)
			ended[from+" to "+to] = c
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
				defer cancel()
				conn, err := s.hosts[from].Dial(ctx, "tcp", "", to)
				if err == nil {
					conn.Close()
				}
				c <- err
			}()
			n++
			s.tracked(n)
		}
	}
	s.endpoints("web", ready("pod2"))
	s.write()
	for what, c := range ended {
		if err := <-c; !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: %v, want ECONNREFUSED", what, err)
		}
	}
	s.conn("client", "10.96.0.1:80", "pod2")
}

// tracked waits until connection tracking has n connections to pod1.
func (s *site) tracked(n int) {
	s.t.Helper()
	for end := time.Now().Add(testtime.Timeout); ; time.Sleep(time.Millisecond) {
		got := 0
		must.Do(s.t, s.hosts["node"].Do(func() error {
			for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				family := map[tracker.Family]netlink.InetFamily{tracker.IPv4: unix.AF_INET, tracker.IPv6: unix.AF_INET6}[f]
				flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
				if err != nil {
					return err
				}
				for _, flow := range flows {
					if flow.Reverse.SrcIP.Equal(s.addr("pod1", f).AsSlice()) {
						got++
					}
				}
			}
			return nil
		}))
		if got >= n {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("connection tracking has %d connections to pod1, want %d", got, n)
		}
	}
}

func TestTerminatingEndpointKeepsItsConnections(t *testing.T) {
	s := newSite(t, Config{})
	c := s.conn("client", "10.96.0.1:80", "pod1")
	s.endpoints("web", state{pod: "pod1", terminating: true, serving: true}, ready("pod2"))
	s.write()
	s.endpoints("web", ready("pod2"))
	s.write()
	if got, err := ask(c); got != "pod1" || err != nil || s.pairs() != 0 {
		t.Errorf("%q, %v, %d pairs", got, err, s.pairs())
	}
	// One that terminated without serving ends when it leaves.
	c = s.conn("client", "10.96.0.1:80", "pod2")
	s.endpoints("web", state{pod: "pod2", terminating: true}, ready("pod1"))
	s.write()
	if got, err := ask(c); got != "pod2" || err != nil {
		t.Errorf("terminating: %q, %v", got, err)
	}
	s.endpoints("web", ready("pod1"))
	s.write()
	if _, err := ask(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("gone: %v, want a reset", err)
	}
}

// TestConnectionsToFailedNodeEndWithThePodObject has what Kubernetes writes when a node fails. The
// endpoint is not ready, minutes later terminating, and missing only after the Pod object is deleted,
// by force or because of the out-of-service taint. Until then the connections hang.
func TestConnectionsToFailedNodeEndWithThePodObject(t *testing.T) {
	s := newSite(t, Config{})
	var conns []net.Conn
	for _, to := range destinations {
		conns = append(conns, s.conn("client", to, "pod1"))
	}
	s.silence("pod1", true)
	for _, pod1 := range []state{{pod: "pod1", failed: true}, {pod: "pod1", terminating: true}} {
		s.endpoints("web", pod1, ready("pod2"))
		s.write()
		if n := s.pairs(); n != 0 {
			t.Errorf("%+v: %d pairs, want none", pod1, n)
		}
		for _, c := range conns {
			must.Do(t, c.SetDeadline(time.Now().Add(50*time.Millisecond)))
			_, err := c.Write([]byte("who?"))
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%+v: %v: %v, want no answer", pod1, c.RemoteAddr(), err)
			}
		}
	}
	s.endpoints("web", ready("pod2"))
	s.write()
	for _, c := range conns {
		if _, err := ask(c); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("gone: %v: %v, want a reset", c.RemoteAddr(), err)
		}
	}
}

func TestEndpointOfAnotherServiceStays(t *testing.T) {
	s := newSite(t, Config{})
	s.service("other", "10.96.0.2", "fd00:10:96::2")
	s.endpoints("other", ready("pod1"))
	c := s.conn("client", "10.96.0.1:80", "pod1")
	s.endpoints("web", ready("pod2"))
	s.write()
	if got, err := ask(c); got != "pod1" || err != nil || s.pairs() != 0 {
		t.Errorf("%q, %v, %d pairs", got, err, s.pairs())
	}
}

func TestReturnedEndpointGetsConnections(t *testing.T) {
	s := newSite(t, Config{})
	for range 2 {
		s.endpoints("web", ready("pod2"))
		s.write()
		if n := s.pairs(); n != 4 {
			t.Fatalf("%d pairs, want the cluster IP and the NodePort in both families", n)
		}
		s.endpoints("web", ready("pod1"), ready("pod2"))
		if n := s.pairs(); n != 0 {
			t.Fatalf("%d pairs after the endpoint returned", n)
		}
		s.conn("client", "10.96.0.1:80", "pod1")
	}
}

func TestRestartKeepsPairs(t *testing.T) {
	s := newSite(t, Config{})
	c := s.conn("client", "10.96.0.1:80", "pod1")
	s.silence("pod1", true)
	s.endpoints("web", ready("pod2"))
	s.write()
	must.Do(t, s.reset.Close())
	// The kernel ends connections while no process runs.
	if _, err := ask(c); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	next := must.Get(New(t.Context(), Config{NetNS: s.hosts["node"].File(), Delay: time.Millisecond}))(t)
	t.Cleanup(func() { next.Close() })
	s.reset = next
	if n := s.pairs(); n != 4 || len(next.plan.endpoints) != 2 {
		t.Fatalf("%d pairs, %d endpoints after a restart", n, len(next.plan.endpoints))
	}
	// The endpoint returns: a full delta has it.
	s.silence("pod1", false)
	plane := must.Get(nftables.New(t.Context(), nftables.Config{NetNS: s.hosts["node"].File()}))(t)
	t.Cleanup(func() { plane.Close() })
	s.cursor = s.pipe.Engine.Attach("again", next.Wrap(plane))
	s.endpoints("web", ready("pod1"), ready("pod2"))
	if n := s.pairs(); n != 0 {
		t.Errorf("%d pairs after the endpoint returned", n)
	}
	s.conn("client", "10.96.0.1:80", "pod1")
}

func TestSilentSocketsAreDestroyed(t *testing.T) {
	s := newSite(t, Config{DestroySockets: true})
	for _, to := range destinations {
		c := s.conn("node", to, "pod1")
		other := s.conn("node", to, "pod2")
		s.silence("pod1", true)
		ended := make(chan error, 1)
		must.Do(t, c.SetDeadline(time.Now().Add(testtime.Timeout)))
		go func() {
			_, err := c.Read(make([]byte, 1))
			ended <- err
		}()
		s.endpoints("web", ready("pod2"))
		s.write()
		err := <-ended
		if errors.Is(err, os.ErrDeadlineExceeded) {
			netlab.Need(t, false, "SOCK_DESTROY (CONFIG_INET_DIAG_DESTROY)")
		}
		if !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("%s: %v, want ECONNABORTED", to, err)
		}
		if got, err := ask(other); got != "pod2" || err != nil {
			t.Errorf("%s, other endpoint: %q, %v", to, got, err)
		}
		s.silence("pod1", false)
		s.endpoints("web", ready("pod1"), ready("pod2"))
	}
}

// TestDirectConnectionsOfTheNodeStay has Services whose address and port are those of an endpoint, or
// whose NodePort is the endpoint's port. The node's own connections to the endpoint do not use them.
func TestDirectConnectionsOfTheNodeStay(t *testing.T) {
	s := newSite(t, Config{DestroySockets: true})
	s.service("web", "10.96.0.1", "fd00:10:96::1", backendtest.NodePort(8080))
	s.endpoints("web", ready("pod1"))
	through := []net.Conn{s.conn("node", "10.244.1.1:8080", "pod1"), s.conn("node", "[fd00:10:244:1::1]:8080", "pod1")}
	direct := []net.Conn{s.conn("node", "10.244.2.2:8080", "pod1"), s.conn("node", "[fd00:10:244:2::2]:8080", "pod1")}
	s.service("at", "10.96.0.2", "fd00:10:96::2", func(svc *v1.Service) {
		svc.Spec.ExternalIPs, svc.Spec.Ports[0].Port = []string{"10.244.2.2", "fd00:10:244:2::2"}, 8080
	})
	s.endpoints("at", ready("pod1"))
	s.endpoints("at")
	s.endpoints("web")
	s.write()
	for _, c := range direct {
		if got, err := ask(c); got != "pod1" || err != nil {
			t.Errorf("%v: %q, %v", c.RemoteAddr(), got, err)
		}
	}
	for _, c := range through {
		if _, err := ask(c); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%v: %v, want an end", c.RemoteAddr(), err)
		}
	}
}

func TestCleanupRemovesTheTable(t *testing.T) {
	s := newSite(t, Config{})
	for range 2 {
		must.Do(t, Cleanup(t.Context(), Config{NetNS: s.hosts["node"].File()}))
	}
	conn := s.dial("node")
	defer conn.Close()
	err := conn.Get(t.Context(), nfnl.Request{
		Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETTABLE, Family: unix.NFPROTO_INET,
		Attrs: nfnl.AppendString(nil, unix.NFTA_TABLE_NAME, tableName),
	}, func([]byte) error { return nil })
	if !errors.Is(err, unix.ENOENT) {
		t.Errorf("the table after Cleanup: %v, want %v", err, unix.ENOENT)
	}
}

// TestManyOpenFiles runs in a process with more than 1,024 open files, such as the listeners of
// health-check node ports.
func TestManyOpenFiles(t *testing.T) {
	netlab.ManyFiles(t)
	host := netlab.NewHost(t)
	c := Config{NetNS: host.File()}
	r := must.Get(New(t.Context(), c))(t)
	defer r.Close()
	want := pair{netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort("10.244.1.2:8080")}
	must.Do(t, r.table.add(t.Context(), []pair{want}))
	pairs, err := r.table.list(t.Context())
	if left := pairs[want]; err != nil || len(pairs) != 1 || left <= 0 || left > lifetime {
		t.Errorf("%v after add: %v", pairs, err)
	}
	must.Do(t, r.table.remove(t.Context(), []pair{want}))
	if pairs, err := r.table.list(t.Context()); err != nil || len(pairs) != 0 {
		t.Errorf("%v after remove: %v", pairs, err)
	}
	must.Do(t, Cleanup(t.Context(), c))
}

// TestRulesReadAsDocumented compares the rules with what nft prints.
func TestRulesReadAsDocumented(t *testing.T) {
	s := newSite(t, Config{})
	out := must.Get(s.hosts["node"].Run(t, "nft", "list chain inet "+tableName+" forward"))(t)
	for _, want := range []string{
		"ct original ip daddr . ct original proto-dst . ip daddr . tcp dport @addresses-4",
		"ct original ip6 daddr . ct original proto-dst . ip6 daddr . tcp dport @addresses-6",
		"ct original proto-dst . ip daddr . tcp dport @nodeports-4",
		"reject with tcp reset", "ct status dnat",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
}
