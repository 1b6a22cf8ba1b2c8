//go:build linux

package wholeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// localhostSite is a site with both families, whose pods also answer over UDP.
func localhostSite(t *testing.T) *site {
	t.Helper()
	s := newSite(t)
	s.Node.Addrs("eth0", "2001:db8::1/64")
	s.Node.Addrs("pods", "fd00:1::1/64")
	for i := range podIPs {
		a := fmt.Sprintf("fd00:1::%d", 2+i)
		s.pods.Addrs("eth0", a+"/64")
		lab.Serve(a, s.pods, a)
	}
	s.pods.Routes("", "fd00:1::1", "::/0")
	return s
}

// dualService is a Service with a NodePort over TCP and one over UDP.
func dualService(spec ...string) string {
	return `apiVersion: v1
kind: Service
metadata:
  name: dual
spec:
  type: NodePort
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20, "fd00:96::20"]
  ipFamilies: [IPv4, IPv6]
  ipFamilyPolicy: RequireDualStack
` + strings.Join(spec, "\n") + `
  ports:
  - {name: tcp, port: 80, nodePort: 30090, protocol: TCP}
  - {name: udp, port: 53, nodePort: 30053, protocol: UDP}
  - {name: sctp, port: 54, nodePort: 30054, protocol: SCTP}
`
}

// dualSlices returns the slices of the Service with the first n pods, all on a node.
func dualSlices(node string, n int) string {
	var b strings.Builder
	for _, f := range []struct{ family, addr string }{{"IPv4", "10.1.0.%d"}, {"IPv6", "fd00:1::%d"}} {
		fmt.Fprintf(&b, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: dual-%s
  labels: {kubernetes.io/service-name: dual}
addressType: %s
ports:
- {name: tcp, port: 8080, protocol: TCP}
- {name: udp, port: 5353, protocol: UDP}
endpoints:
`, strings.ToLower(f.family), f.family)
		for i := range n {
			fmt.Fprintf(&b, "- {addresses: [%q], nodeName: %s}\n", fmt.Sprintf(f.addr, 2+i), node)
		}
	}
	return b.String()
}

// reached returns the servers that answer connections from the node, sorted, or the error of
// the first connection that failed.
func (s *site) reached(network, to string) string {
	return whoAnswers(12, network, func() (*lab.Talk, error) { return s.dialNew(network, to) })
}

// refuses waits until the node refuses connections. A process that another test starts has copies of the
// agent's sockets until it executes its program.
func (s *site) refuses(t *testing.T, network, to string) {
	t.Helper()
	eventually(t, network+" "+to+" is refused", func() bool { return strings.Contains(s.reached(network, to), "refused") })
}

// whoAnswers returns the servers that answer n connections, sorted, or the first error.
func whoAnswers(n int, network string, dial func() (*lab.Talk, error)) string {
	var out []string
	for range n {
		c, err := dial()
		if err != nil {
			return err.Error()
		}
		if network == "udp" {
			_, err = c.Write([]byte("?"))
		}
		name := ""
		if err == nil {
			name, _, err = c.Hear()
		}
		c.Close()
		if err != nil {
			return err.Error()
		}
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// dialNew connects from the node to an address, from a source port that no connection of the site had: a
// UDP flow with the port of an earlier one would have the endpoint of that one.
func (s *site) dialNew(network, to string) (*lab.Talk, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testtime.Timeout)
	defer cancel()
	s.sourcePorts++
	from := "0.0.0.0"
	if strings.HasPrefix(to, "[") {
		from = "::"
	}
	c, err := s.Node.Dial(ctx, network, net.JoinHostPort(from, strconv.Itoa(10000+s.sourcePorts)), to)
	if err != nil {
		return nil, err
	}
	return lab.NewTalk(c), nil
}

// loopbackPorts are the NodePorts of dualService at loopback addresses, and the first two
// pods behind them.
var loopbackPorts = []struct{ network, to, pods string }{
	{"tcp", "127.0.0.1:30090", "10.1.0.2 10.1.0.3"},
	{"tcp", "[::1]:30090", "fd00:1::2 fd00:1::3"},
	{"udp", "127.0.0.1:30053", "10.1.0.2 10.1.0.3"},
	{"udp", "[::1]:30053", "fd00:1::2 fd00:1::3"},
}

// TestLocalhostNodePortsAreServed connects from the node to NodePorts at loopback addresses,
// in each mode that runs here.
func TestLocalhostNodePortsAreServed(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			testLocalhost(t, mode)
		})
	}
}

// testLocalhost tests NodePorts at loopback addresses in a mode. [TestIPVSNode] does it for mode
// ipvs.
func testLocalhost(t *testing.T, mode string) {
	t.Helper()
	needMode(t, mode)
	s := localhostSite(t)
	p := s.agent(t, dualService()+dualSlices("n1", 2), "--proxy-mode", mode, "--nodeport-addresses", "primary,localhost", "--metrics-bind-address", metricsAt)
	p.synced(t, "services=1 endpoints=8 changed=6")
	p.logged(t, "this process serves NodePorts at loopback addresses")
	all := func(pods string) string { return pods }
	first := func(pods string) string { name, _, _ := strings.Cut(pods, " "); return name }
	expect := func(when string, want func(pods string) string) {
		t.Helper()
		for _, lp := range loopbackPorts {
			if got := s.reached(lp.network, lp.to); got != want(lp.pods) {
				t.Errorf("%s: %s %s reaches %q, want %q", when, lp.network, lp.to, got, want(lp.pods))
			}
		}
	}
	expect("two endpoints", all)
	// The policy Local does not restrict the node itself.
	p.apply(t, dualService("  externalTrafficPolicy: Local", "  internalTrafficPolicy: Local")+dualSlices("other", 2), "services=1 endpoints=8 changed=6")
	expect("both policies Local and remote endpoints", all)
	p.apply(t, dualService("  sessionAffinity: ClientIP")+dualSlices("n1", 2), "services=1 endpoints=8 changed=6")
	for _, lp := range loopbackPorts {
		if got := s.reached(lp.network, lp.to); len(strings.Fields(got)) != 1 || !strings.Contains(lp.pods, got) {
			t.Errorf("with affinity %s %s reaches %q", lp.network, lp.to, got)
		}
	}
	p.apply(t, dualService()+dualSlices("n1", 1), "services=1 endpoints=4 changed=6")
	expect("one endpoint", first)
	families := 2
	if mode == "iptables" {
		families = 1
	}
	const listeners = "\nkubeproxy_nftables_localhost_nodeport_listeners{ip_family="
	if text := metricsOn(t, s.Client, metricsAt); strings.Count(text, listeners) != families || !strings.Contains(text, listeners+"\"IPv6\"} 2\n") {
		t.Errorf("not %d families with listeners, of IPv6 2:\n%s", families, text)
	}
	// Without endpoints the kernel refuses connections.
	p.apply(t, dualService(), "services=1 endpoints=0 changed=4")
	for _, lp := range loopbackPorts {
		s.refuses(t, lp.network, lp.to)
	}
	p.apply(t, dualService()+dualSlices("n1", 1), "services=1 endpoints=4 changed=4")
	expect("endpoints are back", first)

	// The agent ends immediately, with its connections.
	c := must.Get(lab.Dial(s.Node, "tcp", "", "[::1]:30090", testtime.Timeout))(t)
	defer c.Close()
	if _, _, err := c.Hear(); err != nil {
		t.Fatal(err)
	}
	if code, _ := p.stop(t); code != 0 || p.loggedErrors() {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
	}
	if _, _, err := c.Ask(); err == nil {
		t.Error("a connection outlives the agent")
	}
	s.refuses(t, "tcp", "[::1]:30090")
}

// TestLocalhostNodePortIsSharedFairly has another process at a NodePort, which the agent reports once and retries. Then
// connections fill the NodePort, where few files may be open: its own oldest ones are reset.
func TestLocalhostNodePortIsSharedFairly(t *testing.T) {
	t.Parallel()
	s := localhostSite(t)
	l := must.Get(s.Node.Listen("tcp", "127.0.0.1:30090"))(t)
	dir := t.TempDir()
	put(t, dir, "dual.yaml", dualService()+dualSlices("n1", 2))
	rollOut(t, dir, podIPs[0])
	p := startWith(t, s.Node, []string{filesEnv + "=480"}, "run", "--manifests", dir, "--hostname-override", "n1", "--nodeport-addresses", "localhost",
		"--sync-period", "1s", "--metrics-bind-address", metricsAt)
	p.synced(t, "services=2 endpoints=9 changed=7") // no failed=, since the rules are in effect
	counter := func(name string) (n int) {
		_, rest, _ := strings.Cut(metricsOn(t, s.Client, metricsAt), "\nkubeproxy_nftables_localhost_nodeport_"+name+"} ")
		fmt.Sscan(rest, &n)
		return n
	}
	eventually(t, "three attempts", func() bool { return counter(`listener_creation_failures_total{ip_family="IPv4"`) >= 3 })
	// The other ports are served all the time.
	for _, lp := range loopbackPorts[1:] {
		if got := s.reached(lp.network, lp.to); got != lp.pods {
			t.Errorf("%s %s reaches %q", lp.network, lp.to, got)
		}
	}
	l.Close()
	eventually(t, "the port is served", func() bool { return s.reached("tcp", "127.0.0.1:30090") == loopbackPorts[0].pods })
	const line = "cannot serve NodePorts at a loopback address"
	if n := strings.Count(p.log(), line); n != 1 || !strings.Contains(p.log(), "address already in use") || strings.Contains(p.log(), "sync failed") {
		t.Errorf("%d lines; log:\n%s", n, p.log())
	}

	most := modes.LimitsFor(480).Connections
	var open []*lab.Talk
	for range most + 20 {
		open = append(open, talk(t, s.Node, "127.0.0.1:30090"))
	}
	for i, c := range open {
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if _, err := io.Copy(io.Discard, c.Conn); errors.Is(err, syscall.ECONNRESET) != (i < 20) {
			t.Errorf("connection %d: %v", i, err)
		}
	}
	// Connections of reached may still have been open.
	if n := counter(`rejected_packets_total{ip_family="IPv4",protocol="TCP"`); n < 20 || n > 32 {
		t.Errorf("%d rejected connections", n)
	}
	if got := s.reached("tcp", "127.0.0.1:30080"); got != podIPs[0] {
		t.Errorf("another Service: %q", got)
	}
}
