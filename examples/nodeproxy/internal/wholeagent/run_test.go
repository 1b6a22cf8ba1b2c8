//go:build linux

package wholeagent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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
	s.Client.Routes("", "192.0.2.1", "10.96.0.0/12")
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

// TestRunFollowsManifests has invalid documents beside valid ones, and another process that deletes the tables.
// Package manifests tests the rest.
func TestRunFollowsManifests(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	p := s.agent(t, "a: b\n---\nkind: Service\nmetadata: ]\n---\n"+webService+"---\n"+webSlice(podIPs[:2]...))
	p.synced(t, "services=1 endpoints=2 changed=1")
	p.logged(t, p.dir+"/web.yaml:1: has no kind")
	p.logged(t, p.dir+"/web.yaml:3: ")
	s.answeredBy(t, clusterVIP, podIPs[:2]...)
	// Without a Node object, the node's address comes from the default route.
	s.answeredBy(t, nodePort, podIPs[:2]...)
	p.apply(t, webService+"---\n# No change.\n"+webSlice(podIPs[:2]...), "services=1 endpoints=2 changed=0")
	must.Do(t, s.Node.Do(func() error { return nftables.Cleanup(context.Background(), nftables.Config{}) }))
	p.logged(t, "repairing the rules")
	eventually(t, "the rules are repaired", func() bool { return lab.Visits(s.Client, "", clusterVIP, 20).Answered(podIPs[:2]...) })
}

// explainedModes are the modes that any kernel has.
var explainedModes = []string{"nftables", "iptables"}
