//go:build linux

package wholeagent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
)

// site is a node between a client and a host that stands for all pods.
type site struct {
	*lab.Lab
	pods *netlab.Host
	// sourcePorts is how many source ports dialNew has used.
	sourcePorts int
}

var podIPs = []string{"10.1.0.2", "10.1.0.3", "10.1.0.4"}

const (
	clusterVIP = "10.96.0.10:80"
	nodePort   = "192.0.2.1:30080"
)

func newSite(t *testing.T) *site {
	t.Helper()
	network, hosts := netlab.NewHosts(t, "node", "client", "pods")
	s := &site{Lab: &lab.Lab{Lab: network, Node: hosts["node"], Client: hosts["client"]}, pods: hosts["pods"]}
	s.Node.Forward()
	network.Link(s.Node, "eth0", s.Client, "eth0")
	s.Node.Addrs("eth0", "192.0.2.1/24")
	s.Client.Addrs("eth0", "192.0.2.9/24")
	s.Node.Routes("", "192.0.2.9", "0.0.0.0/0")
	s.Client.Routes("", "192.0.2.1", "10.96.0.0/16")
	network.Link(s.Node, "pods", s.pods, "eth0")
	s.Node.Addrs("pods", "10.1.0.1/24")
	for _, ip := range podIPs {
		s.pods.Addrs("eth0", ip+"/24")
		lab.Serve(ip, s.pods, ip)
	}
	s.pods.Routes("", "10.1.0.1", "0.0.0.0/0")
	return s
}

// webService is the Service web as YAML, and webSlice its endpoints.
const webService = `apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  ports:
  - {name: http, port: 80, nodePort: 30080}
`

func webSlice(ips ...string) string {
	var b strings.Builder
	b.WriteString(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels: {kubernetes.io/service-name: web}
addressType: IPv4
ports:
- {name: http, port: 8080}
endpoints:
`)
	for _, ip := range ips {
		fmt.Fprintf(&b, "- addresses: [%s]\n", ip)
	}
	return b.String()
}

// put replaces a file in one step.
func put(t *testing.T, dir, name, text string) {
	t.Helper()
	path := filepath.Join(dir, name)
	must.Do(t, os.WriteFile(path+".new", []byte(text), 0o644))
	must.Do(t, os.Rename(path+".new", path))
}

// serveWeb is agent with the Service web and endpoints for it. It waits until the Service is in effect.
func (s *site) serveWeb(t *testing.T, ips []string, flags ...string) *process {
	t.Helper()
	p := s.agent(t, webService+"---\n"+webSlice(ips...), flags...)
	p.synced(t, fmt.Sprintf("services=1 endpoints=%d changed=1", len(ips)))
	return p
}

// agent runs the agent with manifests in p.dir, and flags, without a pause between syncs.
func (s *site) agent(t *testing.T, manifests string, flags ...string) *process {
	t.Helper()
	dir := t.TempDir()
	put(t, dir, "web.yaml", manifests)
	p := embed(t, s.Node, append([]string{"run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s"}, flags...)...)
	p.dir = dir
	return p
}

// apply replaces the manifests of an agent, and waits until they are in effect.
func (p *process) apply(t *testing.T, manifests, fields string) {
	t.Helper()
	put(t, p.dir, "web.yaml", manifests)
	p.synced(t, fields)
}

// web is apply for the Service web with endpoints.
func (p *process) web(t *testing.T, ips ...string) {
	t.Helper()
	p.apply(t, webService+"---\n"+webSlice(ips...), fmt.Sprintf("services=1 endpoints=%d changed=1", len(ips)))
}

// webSite returns a site, and a folder of manifests with the Service web and endpoints for it.
func webSite(t *testing.T, ips ...string) (s *site, dir string) {
	t.Helper()
	s, dir = newSite(t), t.TempDir()
	rollOut(t, dir, ips...)
	return s, dir
}

// stream opens connections to the Service web until it is stopped.
func (s *site) stream() *lab.Stream { return s.streamTo(clusterVIP) }

// streamTo opens connections to an address and to nodePort. In the tests' long form each connection
// begins when the one before it has ended. That takes all processors, which other tests wait for.
func (s *site) streamTo(to string) *lab.Stream {
	pause := 5 * time.Millisecond
	if testtime.Thorough() {
		pause = 0
	}
	return lab.StartStream(&lab.Stream{Visit: lab.Visit, Pause: pause}, s.Client, to, s.Client, nodePort)
}

// answeredBy checks that connections are answered by exactly these endpoints.
func (s *site) answeredBy(t *testing.T, to string, ips ...string) {
	t.Helper()
	if y := lab.Visits(s.Client, "", to, 60); !y.Answered(ips...) {
		t.Errorf("%s is answered by %v, want %v", to, y, ips)
	}
}

func TestRunFollowsManifests(t *testing.T) {
	t.Parallel()
	s, dir := webSite(t, podIPs[:2]...)
	put(t, dir, "bad.yaml", "a: b\n---\nkind: [\n")
	args := []string{"run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s"}
	p := start(t, s.Node, args...)
	p.synced(t, "services=1 endpoints=2 changed=1")
	p.logged(t, dir+"/bad.yaml:1: has no kind")
	p.logged(t, dir+"/bad.yaml:3: ")
	s.answeredBy(t, clusterVIP, podIPs[:2]...)
	// Without a Node object, the node's address comes from the default route.
	s.answeredBy(t, nodePort, podIPs[:2]...)

	rollOut(t, dir, podIPs[1:]...)
	p.synced(t, "services=1 endpoints=2 changed=1")
	s.answeredBy(t, clusterVIP, podIPs[1:]...)

	put(t, dir, "web.yaml", webService+"---\n# No change.\n"+webSlice(podIPs[1:]...))
	p.synced(t, "services=1 endpoints=2 changed=0")

	// An invalid document is skipped, and the documents after it are read.
	put(t, dir, "web.yaml", "kind: Service\nmetadata: ]\n---\n"+webService+"---\n"+webSlice(podIPs...))
	p.synced(t, "services=1 endpoints=3 changed=1")
	p.logged(t, dir+"/web.yaml:1: ")
	s.answeredBy(t, nodePort, podIPs...)

	put(t, dir, "other.json", `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other"},
		"spec": {"clusterIP": "10.96.0.11", "ports": [{"port": 80}]}}`)
	p.synced(t, "services=2 endpoints=3 changed=1")
	must.Do(t, os.Remove(filepath.Join(dir, "other.json")))
	p.synced(t, "services=1 endpoints=3 changed=1")

	// Another process deletes the table. The repair prints no line.
	wipe(t, s.Node)
	p.logged(t, "repairing the rules")
	for end := time.Now().Add(3 * time.Minute); ; {
		if _, _, err := lab.VisitSoon(s.Client, "", clusterVIP); err == nil {
			break
		} else if time.Now().After(end) {
			t.Fatalf("the rules are not repaired: %v", err)
		}
	}
	s.answeredBy(t, clusterVIP, podIPs...)

	// No connection fails while the agent is killed, the manifests change, and another
	// agent takes over.
	stream := s.stream()
	stream.Next(20)
	p.Process.Kill()
	if _, rest := p.exit(t); len(rest) != 0 {
		t.Errorf("unexpected lines: %q", rest)
	}
	stream.Next(20)
	rollOut(t, dir, podIPs[0])
	p = start(t, s.Node, args...)
	p.synced(t, "services=1 endpoints=1 changed=1")
	if y := stream.Next(20); !y.Answered(podIPs[0]) {
		t.Errorf("after the restart: %v", y)
	}
	if y := stream.Stop(); len(y.Errs) != 0 {
		t.Errorf("during the restart %d connections failed, first: %v", len(y.Errs), y.Errs[0])
	}

	// The rules stay in effect without the agent until --cleanup.
	if code, rest := p.stop(t); code != 0 || len(rest) != 0 {
		t.Errorf("exit status %d after SIGTERM, lines %q, log:\n%s", code, rest, p.log())
	}
	s.answeredBy(t, clusterVIP, podIPs[0])
	cleanup(t, s.Node)
	if name, _, err := lab.VisitSoon(s.Client, "", clusterVIP); err == nil {
		t.Errorf("%s still answers after --cleanup", name)
	}
}

// wipe deletes the agent's tables behind its back.
func wipe(t *testing.T, h *netlab.Host) {
	t.Helper()
	must.Do(t, h.Do(func() error { return nftables.Cleanup(context.Background(), nftables.Config{}) }))
}

// TestExplainComparesWithTheKernel runs explain after changes of the rules and of the
// objects.
func TestExplainComparesWithTheKernel(t *testing.T) {
	t.Parallel()
	for _, mode := range explainedModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			s, dir := webSite(t, podIPs[:2]...)
			flags := []string{"--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode}
			asks := func(code int, want ...string) {
				t.Helper()
				for _, to := range []string{clusterVIP, nodePort} {
					got, out, log := verb(t, s.Node, append(append([]string{"explain"}, flags...), "--from", "192.0.2.9", to)...)
					for _, line := range want {
						if got != code || !slices.Contains(out, "kernel: "+line) {
							t.Errorf("exit status %d, want %d; %q in\n%s\n%s", got, code, line, strings.Join(out, "\n"), log)
						}
					}
				}
			}
			asks(1, "mode "+mode+" has no rules in this network namespace")
			p := embed(t, s.Node, append([]string{"run", "--min-sync-period", "0s"}, flags...)...)
			p.synced(t, "services=1 endpoints=2 changed=1")
			asks(0, "endpoint 10.1.0.2:8080", "endpoint 10.1.0.3:8080", "agrees")
			for _, to := range []string{"10.96.0.10:81", "10.96.0.99:80", "192.0.2.1:80", "203.0.113.7:80"} {
				if code, out, log := verb(t, s.Node, append(append([]string{"explain"}, flags...), "--from", "198.51.100.9", to)...); code != 0 || !slices.Contains(out, "kernel: agrees") {
					t.Errorf("%s: exit status %d:\n%s\n%s", to, code, strings.Join(out, "\n"), log)
				}
			}
			p.stop(t)
			// No agent follows this change.
			rollOut(t, dir, podIPs[1:]...)
			asks(1, "endpoint 10.1.0.2:8080", "DIFFERS from what the objects require")
			rollOut(t, dir, podIPs[:2]...)
			asks(0, "agrees")
		})
	}
}

// explainedModes are the modes that any kernel has.
var explainedModes = []string{"nftables", "iptables"}
