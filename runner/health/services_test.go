package health_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// cluster holds a tracker and an engine for node-a.
type cluster struct {
	t *testing.T
	*tracker.Tracker
	engine  *ruleset.Engine
	created int64 // the creation time of the next Services, in seconds
}

func newCluster(t *testing.T, at ...string) *cluster {
	t.Helper()
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := ruleset.ParseNodePortAddresses(at)
	if err != nil {
		t.Fatal(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{Source: tr, NodePortAddresses: addrs})
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return &cluster{t: t, Tracker: tr, engine: e}
}

func named(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: name}
}

// service sets a Service with two ports; port 0 means no health-check node port. Its
// families are those given, or both if none are given.
func (c *cluster) service(name string, ip byte, check uint16, families ...v1.IPFamily) {
	if families == nil {
		families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	}
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.Unix(c.created, 0)},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
			HealthCheckNodePort: int32(check),
			IPFamilies:          families,
			Ports:               []v1.ServicePort{{Name: "a", Port: 80, NodePort: 30000}, {Name: "b", Port: 81, NodePort: 30001}},
		},
	}
	for _, f := range families {
		form := "10.0.0.%d"
		if f == v1.IPv6Protocol {
			form = "fd00::%d"
		}
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, fmt.Sprintf(form, ip))
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	if check == 0 {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	}
	c.SetService(s)
}

// slice sets a Service's endpoints, each "address node" or "address node
// terminating".
func (c *cluster) slice(service string, typ discovery.AddressType, endpoints ...string) {
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: service + "-" + string(typ), Labels: map[string]string{discovery.LabelServiceName: service}},
		AddressType: typ,
	}
	for i, name := range []string{"a", "b"} {
		port := int32(8080 + i)
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Port: &port})
	}
	for _, e := range endpoints {
		f := strings.Fields(e)
		ep := discovery.Endpoint{Addresses: f[:1], NodeName: &f[1]}
		if len(f) > 2 {
			no, yes := false, true
			ep.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	c.SetSlice(s)
}

func TestServicesCountLocalEndpoints(t *testing.T) {
	c := newCluster(t)
	healthy := true
	s := health.NewServices(health.ServicesConfig{ProxyHealthy: func() bool { return healthy }})
	cur := c.engine.Attach("health", s)
	sync := func() {
		t.Helper()
		if err := cur.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// answersIn checks the response for clients of a family.
	answersIn := func(f tracker.Family, name string, code, local int) {
		t.Helper()
		w := httptest.NewRecorder()
		s.Handler(named(name), f).ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		want := fmt.Sprintf(`{"service":{"namespace":"ns","name":%q},"localEndpoints":%d,"serviceProxyHealthy":%v}`+"\n", name, local, healthy)
		if w.Code != code || w.Body.String() != want {
			t.Errorf("%s: %d %s, want %d %s", name, w.Code, w.Body, code, want)
		}
		h := w.Header()
		if h.Get("X-Load-Balancing-Endpoint-Weight") != strconv.Itoa(local) || h.Get("Content-Type") != "application/json" || h.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: headers %v", name, h)
		}
	}
	answers := func(name string, code, local int) {
		t.Helper()
		answersIn(tracker.IPv4, name, code, local)
	}
	answers("web", 503, 0)
	c.service("web", 1, 32000)
	c.service("plain", 2, 0)
	c.slice("web", discovery.AddressTypeIPv4, "10.1.0.1 node-a", "10.1.0.2 node-b", "10.1.0.3 node-a", "10.1.0.4 node-a terminating")
	c.slice("plain", discovery.AddressTypeIPv4, "10.1.0.1 node-a")
	sync()
	answers("web", 200, 2)
	answers("plain", 503, 0)
	answersIn(tracker.IPv6, "web", 503, 0)
	if port, n, ok := s.Get(named("web"), tracker.IPv4); port != 32000 || n != 2 || !ok {
		t.Errorf("Get: %d %d %v", port, n, ok)
	}
	if _, _, ok := s.Get(named("plain"), tracker.IPv4); ok {
		t.Error("plain has a health-check node port")
	}
	c.slice("web", discovery.AddressTypeIPv6, "fd01::1 node-a", "fd01::2 node-a", "fd01::3 node-a")
	sync()
	answersIn(tracker.IPv6, "web", 200, 3)
	answers("web", 200, 2)
	healthy = false
	answers("web", 503, 2)
	answersIn(tracker.IPv6, "web", 503, 3)
	healthy = true
	c.DeleteSlice(named("web-IPv6"))
	c.slice("web", discovery.AddressTypeIPv4, "10.1.0.1 node-b")
	sync()
	answers("web", 503, 0)
	// The node's name becomes known late.
	c.SetNode(tracker.NodeInfo{Name: "node-b"})
	sync()
	answers("web", 200, 1)
	answersIn(tracker.IPv6, "web", 503, 0)
	cur.Resync()
	sync()
	answers("web", 200, 1)
	c.service("web", 1, 0)
	sync()
	if _, _, ok := s.Get(named("web"), tracker.IPv4); ok {
		t.Error("web still has a health-check node port")
	}
	answers("web", 503, 0)
}

// TestServicesAgreeWithTracker compares the counts with those that the tracker
// computes from all endpoints, over many changes.
func TestServicesAgreeWithTracker(t *testing.T) {
	c := newCluster(t)
	all, err := tracker.NewEndpointsChangeTracker(tracker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s := health.NewServices(health.ServicesConfig{})
	cur := c.engine.Attach("health", s)
	n := 0
	for i := range 300 {
		name := fmt.Sprint("s", i%7)
		c.service(name, byte(i%7+1), 32000+uint16(i%7))
		slice := &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(name, "-", i%3), Labels: map[string]string{discovery.LabelServiceName: name}},
			AddressType: discovery.AddressTypeIPv4,
		}
		for p, port := range []string{"a", "b"} {
			number := int32(8080 + p)
			slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &port, Port: &number})
		}
		for e := range i % 5 {
			node, ready := fmt.Sprint("node-", string(rune('a'+(i+e)%2))), (i+e)%3 != 0
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
				Addresses: []string{fmt.Sprintf("10.1.%d.%d", i%4, e+1)}, NodeName: &node,
				Conditions: discovery.EndpointConditions{Ready: &ready},
			})
		}
		c.SetSlice(slice)
		all.Set(slice)
		all.Take()
		if err := cur.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := all.LocalReadyEndpoints("node-a")
		for j := range min(i+1, 7) {
			name := named(fmt.Sprint("s", j))
			if _, got, ok := s.Get(name, tracker.IPv4); !ok || got != want[name] {
				t.Fatalf("step %d: %v has %d local endpoints, want %d", i, name, got, want[name])
			}
			n += want[name]
		}
	}
	if n == 0 {
		t.Error("the test had no local endpoint")
	}
}

// listeners opens ports that the kernel chooses and stores them by the address
// requested.
type listeners struct {
	mu    sync.Mutex
	at    map[string]net.Listener // by requested network and address
	taken map[string]bool         // ports that cannot be opened
}

type counted struct {
	net.Listener
	gone func()
	once sync.Once
}

func (l *counted) Close() error { l.once.Do(l.gone); return l.Listener.Close() }

func (l *listeners) listen(ctx context.Context, network, address string) (net.Listener, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := network + " " + address
	if l.taken[key] || l.at[key] != nil {
		return nil, errors.New("address already in use")
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l.at[key] = &counted{Listener: ln, gone: func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.at, key)
	}}
	return l.at[key], nil
}

func (l *listeners) open() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for key := range l.at {
		out = append(out, key)
	}
	slices.Sort(out)
	return out
}

// ask returns the name and count in the response of a port.
func (l *listeners) ask(t *testing.T, key string) string {
	t.Helper()
	l.mu.Lock()
	ln := l.at[key]
	l.mu.Unlock()
	if ln == nil {
		t.Errorf("nothing listens at %s, but at %q", key, l.open())
		return ""
	}
	r, err := http.Get("http://" + ln.Addr().String() + "/whatever")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	var a struct {
		Service        struct{ Name string }
		LocalEndpoints int
	}
	if err := json.Unmarshal(body, &a); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(a.Service.Name, " ", a.LocalEndpoints)
}

func TestNodePortsOpenAndClose(t *testing.T) {
	c := newCluster(t)
	l := &listeners{at: map[string]net.Listener{}, taken: map[string]bool{}}
	var failures []string
	n := health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{}),
		Listen:   l.listen,
		Failed: func(name types.NamespacedName, port uint16, err error) {
			failures = append(failures, fmt.Sprintf("%v %d", name, port))
		},
	})
	cur := c.engine.Attach("health", n)
	sync := func() {
		t.Helper()
		if err := cur.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	isOpen := func(want ...string) {
		t.Helper()
		if got := l.open(); !slices.Equal(got, want) {
			t.Errorf("open: %q, want %q", got, want)
		}
	}
	c.service("x", 1, 32001)
	c.service("y", 2, 32002)
	c.slice("x", discovery.AddressTypeIPv4, "10.1.0.1 node-a")
	sync()
	isOpen("tcp4 0.0.0.0:32001", "tcp4 0.0.0.0:32002", "tcp6 [::]:32001", "tcp6 [::]:32002")
	if got := l.ask(t, "tcp4 0.0.0.0:32001"); got != "x 1" {
		t.Errorf("x's port responds with %q", got)
	}
	// Two Services swap their ports.
	c.service("x", 1, 32002)
	c.service("y", 2, 32001)
	sync()
	isOpen("tcp4 0.0.0.0:32001", "tcp4 0.0.0.0:32002", "tcp6 [::]:32001", "tcp6 [::]:32002")
	if got := l.ask(t, "tcp6 [::]:32002"); got != "x 1" {
		t.Errorf("x's new port responds with %q", got)
	}
	c.DeleteService(named("y"))
	sync()
	isOpen("tcp4 0.0.0.0:32002", "tcp6 [::]:32002")

	// A port in use is reported once and retried. Other ports are not affected.
	l.taken["tcp4 0.0.0.0:32003"] = true
	c.service("x", 1, 32003)
	c.service("z", 3, 32004)
	var p *ruleset.PartialError
	for range 3 {
		if err := cur.Sync(t.Context()); !errors.As(err, &p) || len(p.Failed) != 4 {
			t.Fatalf("error %v, want 4 keys of x in a PartialError", err)
		}
	}
	isOpen("tcp4 0.0.0.0:32004", "tcp6 [::]:32003", "tcp6 [::]:32004")
	if !slices.Equal(failures, []string{"ns/x 32003"}) {
		t.Errorf("failures: %q", failures)
	}
	delete(l.taken, "tcp4 0.0.0.0:32003")
	sync()
	isOpen("tcp4 0.0.0.0:32003", "tcp4 0.0.0.0:32004", "tcp6 [::]:32003", "tcp6 [::]:32004")

	if err := n.Close(t.Context()); err != nil {
		t.Error(err)
	}
	isOpen()
	c.service("w", 4, 32005)
	if err := cur.Sync(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// TestOldestServicesGetHealthChecks has room for two ports when the process starts. The oldest
// Services get them, whatever their names, and keep them when others come.
func TestOldestServicesGetHealthChecks(t *testing.T) {
	for range 5 {
		c := newCluster(t)
		l := &listeners{at: map[string]net.Listener{}, taken: map[string]bool{}}
		n := health.NewNodePorts(health.NodePortsConfig{
			Services: health.NewServices(health.ServicesConfig{}),
			Families: []tracker.Family{tracker.IPv4},
			Listen: func(ctx context.Context, network, address string) (net.Listener, error) {
				if len(l.open()) == 2 {
					return nil, errors.New("no more files")
				}
				return l.listen(ctx, network, address)
			},
		})
		defer n.Close(t.Context())
		cur := c.engine.Attach("health", n)
		for i, created := range []int64{0, 400, 200, 300, 500} {
			c.created = created
			c.service(fmt.Sprint("s", i), byte(i+1), uint16(32000+i))
		}
		want := []string{"tcp4 0.0.0.0:32002", "tcp4 0.0.0.0:32003"}
		for _, created := range []int64{100, 50} {
			if err := cur.Sync(t.Context()); err == nil {
				t.Error("no error")
			}
			if got := l.open(); !slices.Equal(got, want) {
				t.Fatalf("open %q, want %q", got, want)
			}
			c.created = created
			c.service(fmt.Sprint("new", created), 9, 32009)
		}
	}
}

// TestHealthChecksFollowNodePortAddresses restricts NodePorts, and so the health
// checks, to addresses of the node that change.
func TestHealthChecksFollowNodePortAddresses(t *testing.T) {
	c := newCluster(t, "primary")
	l := &listeners{at: map[string]net.Listener{}, taken: map[string]bool{}}
	n := health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{}),
		Families: []tracker.Family{tracker.IPv4},
		Listen:   l.listen,
		LocalAddrs: func() ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("127.0.0.1")}, nil
		},
	})
	defer n.Close(t.Context())
	cur := c.engine.Attach("health", n)
	c.service("x", 1, 32001)
	for _, step := range []struct {
		addr  string
		taken bool
		want  []string
	}{
		{"192.0.2.1", false, []string{"tcp4 192.0.2.1:32001"}},
		{"192.0.2.9", false, nil}, // not an address of the node
		{"192.0.2.2", true, nil},
		{"192.0.2.2", false, []string{"tcp4 192.0.2.2:32001"}},
		{"192.0.2.1", false, []string{"tcp4 192.0.2.1:32001"}},
	} {
		l.taken["tcp4 "+step.addr+":32001"] = step.taken
		c.SetNode(tracker.NodeInfo{Name: "node-a", Addresses: []netip.Addr{netip.MustParseAddr(step.addr)}})
		if err := cur.Sync(t.Context()); (err != nil) != step.taken {
			t.Errorf("at %s: error %v", step.addr, err)
		}
		if got := l.open(); !slices.Equal(got, step.want) {
			t.Errorf("at %s: open %q, want %q", step.addr, got, step.want)
		}
	}
}

// TestRefreshFollowsAddressesOfInterfaces restricts NodePorts to a prefix. Addresses of the node in it
// come and go without a change of an object, and one is in use at first.
func TestRefreshFollowsAddressesOfInterfaces(t *testing.T) {
	c := newCluster(t, "192.0.2.0/24")
	l := &listeners{at: map[string]net.Listener{}, taken: map[string]bool{}}
	var local []netip.Addr
	n := health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{}), Families: []tracker.Family{tracker.IPv4}, Listen: l.listen,
		LocalAddrs: func() ([]netip.Addr, error) { return local, nil },
	})
	defer n.Close(t.Context())
	if err := n.Refresh(t.Context()); err != nil {
		t.Errorf("before the first Apply: %v", err)
	}
	c.service("x", 1, 32001)
	if err := c.engine.Attach("health", n).Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	const one, two = "tcp4 192.0.2.1:32001", "tcp4 192.0.2.2:32001"
	for _, step := range []struct {
		local, taken string
		want         []string
	}{
		{"192.0.2.1", "", []string{one}},
		{"192.0.2.1 198.51.100.1", "", []string{one}},
		{"192.0.2.1 192.0.2.2", two, []string{one}},
		{"192.0.2.1 192.0.2.2", "", []string{one, two}},
		{"192.0.2.2", "", []string{two}},
		{"", "", nil},
	} {
		local, l.taken = nil, map[string]bool{step.taken: true}
		for a := range strings.FieldsSeq(step.local) {
			local = append(local, netip.MustParseAddr(a))
		}
		if err := n.Refresh(t.Context()); (err != nil) != (step.taken != "") {
			t.Errorf("at %s: error %v", step.local, err)
		}
		if got := l.open(); !slices.Equal(got, step.want) {
			t.Errorf("at %s: open %q, want %q", step.local, got, step.want)
		}
	}
}

// TestLoopbackGetsNoHealthChecks has only NodePort addresses in 127.0.0.0/8. That
// leaves no address in IPv4 and does not restrict IPv6.
func TestLoopbackGetsNoHealthChecks(t *testing.T) {
	c := newCluster(t, "127.0.0.0/8")
	l := &listeners{at: map[string]net.Listener{}, taken: map[string]bool{}}
	n := health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{}),
		Listen:   l.listen,
		LocalAddrs: func() ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}, nil
		},
	})
	defer n.Close(context.Background())
	c.service("x", 1, 32001)
	if err := c.engine.Attach("health", n).Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := l.open(); !slices.Equal(got, []string{"tcp6 [::]:32001"}) {
		t.Errorf("open: %q", got)
	}
}
