package health_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// needIPv6 skips the test if the loopback interface has no IPv6 address.
func needIPv6(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		if os.Getenv("PROXIER_REQUIRE_ALL") != "" {
			t.Fatalf("needs IPv6: %v", err)
		}
		t.Skipf("needs IPv6: %v", err)
	}
	l.Close()
}

// sockets opens ports that the kernel chooses, at the requested address or at another
// one.
type sockets struct {
	// instead, if not nil, returns the network and host to open in place of those requested.
	instead func(network, host string) (string, string)

	mu    sync.Mutex
	ports map[string]int // by requested network and host
}

func (s *sockets) listen(ctx context.Context, network, address string) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	key := network + " " + host
	if s.instead != nil {
		network, host = s.instead(network, host)
	}
	l, err := new(net.ListenConfig).Listen(ctx, network, net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ports[key] = l.Addr().(*net.TCPAddr).Port
	return l, nil
}

// answer connects to host, at the port that was opened for key, and returns the
// summary of the response.
func (s *sockets) answer(t *testing.T, key, host string) string {
	t.Helper()
	s.mu.Lock()
	port, ok := s.ports[key]
	s.mu.Unlock()
	if !ok {
		return "not open"
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	r := must.Get(c.Get("http://" + net.JoinHostPort(host, fmt.Sprint(port)) + "/"))(t)
	defer r.Body.Close()
	return summary(t, r.StatusCode, r.Header, r.Body)
}

// summary returns the status, the weight and the number of endpoints in the body.
func summary(t *testing.T, code int, h http.Header, r io.Reader) string {
	t.Helper()
	var body struct{ LocalEndpoints int }
	must.Do(t, json.NewDecoder(r).Decode(&body))
	return fmt.Sprint(code, " ", h.Get("X-Load-Balancing-Endpoint-Weight"), " ", body.LocalEndpoints)
}

// familySteps changes the families and endpoints of a Service and lists the responses
// expected at each family's addresses.
var familySteps = []struct {
	name              string
	families          string // of the Service
	four, six         string // endpoints
	wantFour, wantSix string // summaries at IPv4 and IPv6 addresses
}{
	{"dual-stack, local endpoints in IPv4", "IPv4 IPv6", "10.1.0.1 node-a,10.1.0.2 node-a,10.1.0.3 node-b", "fd01::1 node-b", "200 2 2", "503 0 0"},
	{"dual-stack, local endpoints in IPv6", "IPv4 IPv6", "10.1.0.1 node-b", "fd01::1 node-a", "503 0 0", "200 1 1"},
	{"dual-stack, local endpoints in both", "IPv6 IPv4", "10.1.0.1 node-a", "fd01::1 node-a,fd01::2 node-a", "200 1 1", "200 2 2"},
	{"dual-stack, none", "IPv4 IPv6", "", "", "503 0 0", "503 0 0"},
	{"dual-stack, terminating", "IPv4 IPv6", "10.1.0.1 node-a terminating", "fd01::1 node-a", "503 0 0", "200 1 1"},
	{"becomes IPv4", "IPv4", "10.1.0.1 node-a,10.1.0.2 node-a", "", "200 2 2", "200 2 2"},
	{"IPv4, with a slice of the other family", "IPv4", "10.1.0.1 node-a", "fd01::1 node-a,fd01::2 node-a", "200 1 1", "200 1 1"},
	{"IPv4, none", "IPv4", "10.1.0.1 node-b", "fd01::1 node-a", "503 0 0", "503 0 0"},
	{"becomes dual-stack", "IPv4 IPv6", "10.1.0.1 node-a", "", "200 1 1", "503 0 0"},
	{"becomes IPv6", "IPv6", "10.1.0.1 node-a", "fd01::1 node-a,fd01::2 node-a", "200 2 2", "200 2 2"},
	{"becomes dual-stack again", "IPv6 IPv4", "", "fd01::1 node-a", "503 0 0", "200 1 1"},
}

// TestNodePortsRespondByFamily connects to health-check node ports in both families.
func TestNodePortsRespondByFamily(t *testing.T) {
	needIPv6(t)
	fixed := func(host4, host6 string) func(string, string) (string, string) {
		return func(network, host string) (string, string) {
			if network == "tcp6" {
				return network, host6
			}
			return network, host4
		}
	}
	for _, tt := range []struct {
		name     string
		at       []string // NodePort addresses
		instead  func(network, host string) (string, string)
		key4     string // the listener for IPv4 clients
		key6     string
		host6    string // to connect to in place of ::1
		families []tracker.Family
	}{
		{name: "all addresses", key4: "tcp4 0.0.0.0", key6: "tcp6 ::"},
		{
			name: "one listener for both families", key4: "tcp6 ::", key6: "tcp6 ::",
			instead:  func(string, string) (string, string) { return "tcp", "::" },
			families: []tracker.Family{tracker.IPv6},
		},
		{
			name: "single addresses", at: []string{"primary"}, key4: "tcp4 192.0.2.1", key6: "tcp6 2001:db8::1",
			instead: fixed("127.0.0.1", "::1"),
		},
		{
			name: "single addresses, whatever the listener accepts", at: []string{"primary"}, key4: "tcp4 192.0.2.1", key6: "tcp6 2001:db8::1",
			instead: func(string, string) (string, string) { return "tcp4", "127.0.0.1" }, host6: "127.0.0.1",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, tt.at...)
			c.SetNode(tracker.NodeInfo{Name: "node-a", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}})
			s := &sockets{instead: tt.instead, ports: map[string]int{}}
			n := health.NewNodePorts(health.NodePortsConfig{
				Services: health.NewServices(health.ServicesConfig{}),
				Families: tt.families,
				Listen:   s.listen,
				LocalAddrs: func() ([]netip.Addr, error) {
					return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, nil
				},
			})
			defer n.Close(context.Background())
			cur := c.engine.Attach("health", n)
			host6 := cmp.Or(tt.host6, "::1")
			for _, step := range familySteps {
				setFamilies(c, step.families, step.four, step.six)
				must.Do(t, cur.Sync(t.Context()))
				if got := s.answer(t, tt.key4, "127.0.0.1"); got != step.wantFour {
					t.Errorf("%s: at an IPv4 address %q, want %q", step.name, got, step.wantFour)
				}
				if got := s.answer(t, tt.key6, host6); got != step.wantSix {
					t.Errorf("%s: at an IPv6 address %q, want %q", step.name, got, step.wantSix)
				}
			}
		})
	}
}

func setFamilies(c *cluster, families, four, six string) {
	var f []v1.IPFamily
	for _, name := range strings.Fields(families) {
		f = append(f, v1.IPFamily(name))
	}
	c.service("web", 1, 32000, f...)
	split := func(s string) []string {
		if s == "" {
			return nil
		}
		return strings.Split(s, ",")
	}
	c.slice("web", discovery.AddressTypeIPv4, split(four)...)
	c.slice("web", discovery.AddressTypeIPv6, split(six)...)
}

// TestDefaultListenerOpensNodePorts lets NodePorts open its ports itself, in both
// families.
func TestDefaultListenerOpensNodePorts(t *testing.T) {
	needIPv6(t)
	c := newCluster(t)
	n := health.NewNodePorts(health.NodePortsConfig{Services: health.NewServices(health.ServicesConfig{})})
	defer n.Close(context.Background())
	cur := c.engine.Attach("health", n)
	c.slice("web", discovery.AddressTypeIPv4, "10.1.0.1 node-a")
	c.slice("web", discovery.AddressTypeIPv6, "fd01::1 node-b")
	// Another process may take a port between the choice and the Sync.
	var port int
	var err error
	for range 20 {
		port = freePort(t)
		c.service("web", 1, uint16(port))
		if err = cur.Sync(t.Context()); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	s := &sockets{ports: map[string]int{"": port}}
	if got := s.answer(t, "", "127.0.0.1"); got != "200 1 1" {
		t.Errorf("at an IPv4 address %q", got)
	}
	if got := s.answer(t, "", "::1"); got != "503 0 0" {
		t.Errorf("at an IPv6 address %q", got)
	}
}

// freePort returns a port that no process listens on, below those that the kernel gives to clients and to
// listeners at port 0.
func freePort(t *testing.T) int {
	t.Helper()
	for port := 15000; port < 16000; port++ {
		if l, err := net.Listen("tcp", fmt.Sprint("[::]:", port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}
