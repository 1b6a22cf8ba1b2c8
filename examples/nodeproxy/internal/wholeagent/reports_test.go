//go:build linux

package wholeagent

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// report is a node with a folder of manifests, on which a public report is played.
type report struct {
	*site
	t   *testing.T
	dir string
}

func newReport(t *testing.T, manifests ...string) *report {
	t.Parallel()
	r := &report{site: newSite(t), t: t, dir: t.TempDir()}
	r.objects(manifests...)
	return r
}

// objects replaces the manifests.
func (r *report) objects(manifests ...string) {
	r.t.Helper()
	put(r.t, r.dir, "objects.yaml", strings.Join(manifests, "---\n"))
}

// run starts the agent and waits until the manifests are in effect.
func (r *report) run(mode string, flags ...string) *process {
	r.t.Helper()
	p := start(r.t, r.Node, append([]string{"run", "--manifests", r.dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", mode}, flags...)...)
	p.line(r.t)
	return p
}

// end ends an agent by a signal.
func (r *report) end(p *process) {
	p.Process.Signal(syscall.SIGTERM)
	p.exit(r.t)
}

// answers waits until exactly these endpoints answer.
func (r *report) answers(to string, ips ...string) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("%s is answered by %v", to, ips), func() bool { return lab.Visits(r.Client, "", to, 20).Answered(ips...) })
}

// dnsService is a Service over UDP, and dnsSlice its endpoints.
const dnsService = `apiVersion: v1
kind: Service
metadata: {name: dns}
spec: {clusterIP: 10.96.0.53, ports: [{name: dns, port: 53, protocol: UDP}]}
`

func dnsSlice(ips ...string) string {
	return fmt.Sprintf(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns-1, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{name: dns, port: 5353, protocol: UDP}]
endpoints: [{addresses: [%s]}]
`, strings.Join(ips, "]}, {addresses: ["))
}

// asked opens a UDP socket and returns a function that asks over it, until there is an answer.
func (r *report) asked() func() string {
	r.t.Helper()
	c, err := lab.Dial(r.Client, "udp", "", "10.96.0.53:53", testtime.Timeout)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return func() (name string) {
		eventually(r.t, "an answer over UDP", func() bool {
			c.Write([]byte("?"))
			c.SetReadDeadline(time.Now().Add(lab.NoAnswerTimeout))
			b := make([]byte, 100)
			n, err := c.Conn.Read(b)
			name, _, _ = strings.Cut(string(b[:n]), " ")
			return err == nil
		})
		return name
	}
}

// TestPublicReports plays reports of other proxies' operators.
func TestPublicReports(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		// A client keeps its UDP socket while the proxy stands still and the only endpoint is replaced.
		t.Run("kubernetes-125467/"+mode, func(t *testing.T) {
			needMode(t, mode)
			r := newReport(t, dnsService, dnsSlice(podIPs[0]))
			p := r.run(mode)
			ask := r.asked()
			ask()
			p.Process.Signal(syscall.SIGSTOP)
			r.objects(dnsService, dnsSlice(podIPs[1]))
			ask()
			p.Process.Signal(syscall.SIGCONT)
			eventually(t, "the new endpoint answers", func() bool { return ask() == podIPs[1] })
		})
		// UDP flows stay with their endpoint when the proxy restarts.
		t.Run("kubernetes-122740/"+mode, func(t *testing.T) {
			needMode(t, mode)
			r := newReport(t, dnsService, dnsSlice(podIPs...))
			p := r.run(mode)
			var asks []func() string
			var names []string
			for range 10 {
				asks = append(asks, r.asked())
				names = append(names, asks[len(asks)-1]())
			}
			r.end(p)
			r.run(mode)
			time.Sleep(time.Second) // a clean-up follows the sync
			for i, ask := range asks {
				if now := ask(); now != names[i] {
					t.Errorf("flow %d: %s, before %s", i, now, names[i])
				}
			}
		})
		// Clients with affinity leave an endpoint that is no longer ready.
		t.Run("kubernetes-110302/"+mode, func(t *testing.T) {
			needMode(t, mode)
			sticky := strings.Replace(webService, "spec:\n", "spec:\n  sessionAffinity: ClientIP\n", 1)
			r := newReport(t, sticky, webSlice(podIPs[:2]...))
			r.run(mode)
			first, _, err := lab.Visit(r.Client, "", clusterVIP)
			if err != nil {
				t.Fatal(err)
			}
			r.answers(clusterVIP, first)
			other := map[string]string{podIPs[0]: podIPs[1], podIPs[1]: podIPs[0]}[first]
			r.objects(sticky, strings.Replace(webSlice(podIPs[:2]...), "- addresses: ["+first+"]", "- {addresses: ["+first+"], conditions: {ready: false}}", 1))
			r.answers(clusterVIP, other)
		})
		// Interfaces of pods that do not exist yet.
		t.Run("kubernetes-134024/"+mode, func(t *testing.T) {
			needMode(t, mode)
			r := newReport(t, webService, webSlice(podIPs[0]))
			p := r.run(mode, "--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "azv")
			r.answers(clusterVIP, podIPs[0])
			r.answers(nodePort, podIPs[0])
			if p.loggedErrors() {
				t.Error(p.log())
			}
		})
		// loadBalancerSourceRanges are for load-balancer IPs: NodePorts and external IPs have none.
		t.Run("cilium-42334 cilium-44718 cilium-35518/"+mode, func(t *testing.T) {
			needMode(t, mode)
			lb := strings.Replace(webService, "  type: NodePort\n", "  type: LoadBalancer\n  loadBalancerSourceRanges: [203.0.113.0/24]\n  externalIPs: [198.51.100.7]\n", 1) + "status: {loadBalancer: {ingress: [{ip: 198.51.100.8}]}}\n"
			r := newReport(t, lb, webSlice(podIPs[0]))
			if out, err := r.Client.Run(t, "ip", "route", "add", "198.51.100.0/24", "via", "192.0.2.1"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			r.run(mode)
			r.answers(nodePort, podIPs[0])
			r.answers("198.51.100.7:80", podIPs[0])
			for _, to := range []string{"198.51.100.8:80", "198.51.100.8:30080"} {
				if _, err := lab.Dial(r.Client, "tcp", "", to, lab.NoAnswerTimeout); err == nil {
					t.Errorf("%s answers", to)
				}
			}
		})
		// k3s' ServiceLB writes addresses of nodes into the status. With policy Local the client's
		// address stays, and a node that the status does not name forwards nothing at the port.
		t.Run("k3s-2925 k3s-11077/"+mode, func(t *testing.T) {
			needMode(t, mode)
			lb := strings.Replace(webService, "  type: NodePort\n", "  type: LoadBalancer\n  externalTrafficPolicy: Local\n", 1) + "status: {loadBalancer: {ingress: [{ip: 192.0.2.1}, {ip: 192.0.2.77}]}}\n"
			local := strings.ReplaceAll(webSlice(podIPs[0]), "- addresses: ["+podIPs[0]+"]", "- {addresses: ["+podIPs[0]+"], nodeName: n1}")
			r := newReport(t, lb, local)
			r.run(mode)
			r.answers("192.0.2.1:80", podIPs[0])
			if _, source, err := lab.Visit(r.Client, "", "192.0.2.1:80"); err != nil || source != "192.0.2.9" {
				t.Errorf("the pod sees %s, error %v", source, err)
			}
			r.objects(lb, strings.ReplaceAll(local, "nodeName: n1", "nodeName: n2"))
			eventually(t, "no answer without a local endpoint", func() bool {
				_, err := lab.Dial(r.Client, "tcp", "", "192.0.2.1:80", lab.NoAnswerTimeout)
				return err != nil
			})
		})
		// The node gets and loses addresses: the health check follows them, stays after a restart, and
		// is not left when the Service has none.
		t.Run("calico-8112/"+mode, func(t *testing.T) {
			needMode(t, mode)
			lb := strings.Replace(webService, "  type: NodePort\n", "  type: LoadBalancer\n  externalTrafficPolicy: Local\n  healthCheckNodePort: 32000\n", 1)
			local := strings.ReplaceAll(webSlice(podIPs[0]), "- addresses: ["+podIPs[0]+"]", "- {addresses: ["+podIPs[0]+"], nodeName: n1}")
			r := newReport(t, lb, local)
			p := r.run(mode, "--nodeport-addresses", "192.0.2.0/24", "--sync-period", "1s")
			check := func(addr string) int { code, _, _ := get(t, r.Client, "http://"+addr+":32000/"); return code }
			eventually(t, "the check answers", func() bool { return check("192.0.2.1") == 200 })
			for range 3 {
				for _, verb := range []string{"add", "del"} {
					if out, err := r.Node.Run(t, "ip", "addr", verb, "192.0.2.3/24", "dev", "eth0"); err != nil {
						t.Fatalf("%v\n%s", err, out)
					}
					r.objects(lb, strings.ReplaceAll(local, "web-1", "web-"+verb))
					p.line(t)
				}
			}
			if out, err := r.Node.Run(t, "ip", "addr", "add", "192.0.2.3/24", "dev", "eth0"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			eventually(t, "the check answers at the new address", func() bool { return check("192.0.2.3") == 200 })
			r.end(p)
			p = r.run(mode, "--nodeport-addresses", "192.0.2.0/24")
			eventually(t, "the check still answers", func() bool { return check("192.0.2.1") == 200 })
			r.objects(strings.Replace(lb, "  externalTrafficPolicy: Local\n  healthCheckNodePort: 32000\n", "", 1), local)
			eventually(t, "the port is closed", func() bool { return check("192.0.2.1") == 0 })
			if p.loggedErrors() {
				t.Error(p.log())
			}
		})
		// The host's firewall drops what it forwards, as docker's does. Mode nftables cannot accept packets
		// there, and names the chain.
		t.Run("k3s-8706/"+mode, func(t *testing.T) {
			needMode(t, "iptables")
			r := newReport(t, webService, webSlice(podIPs[0]))
			if out, err := r.Node.Run(t, "iptables", "-P", "FORWARD", "DROP"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			p := r.run(mode)
			if mode == "iptables" {
				r.answers(nodePort, podIPs[0])
				return
			}
			p.logged(t, "chain FORWARD of iptables drops packets")
			p.logged(t, "IPv4: -P FORWARD DROP")
			r.unanswered(t, nodePort)
		})
	}
	// localhost comes into nodePortAddresses by a restart.
	t.Run("kubernetes-142183", func(t *testing.T) {
		r := newReport(t, webService, webSlice(podIPs[0]))
		for _, flag := range []string{"primary", "primary,localhost", "primary", "localhost"} {
			p := r.run("nftables", "--nodeport-addresses", flag)
			eventually(t, flag, func() bool {
				return (r.reached("tcp", "127.0.0.1:30080") == podIPs[0]) == strings.Contains(flag, "localhost")
			})
			r.end(p)
		}
	})
	// A chain of an older kube-proxy jumps to the chains of Services and endpoints.
	t.Run("kubernetes-132516", func(t *testing.T) {
		needMode(t, "iptables")
		r := newReport(t, webService, webSlice(podIPs[:2]...))
		p := r.run("iptables")
		text, err := r.Node.Run(t, "iptables-save", "-t", "nat")
		if err != nil {
			t.Fatal(err)
		}
		var old strings.Builder
		old.WriteString("*nat\n:KUBE-XLB-CDGGSHYLG3RE2FKL - [0:0]\n")
		for line := range strings.Lines(text) {
			if f := strings.Fields(line); strings.HasPrefix(line, ":KUBE-SEP-") || strings.HasPrefix(line, ":KUBE-SVC-") || strings.HasPrefix(line, ":KUBE-EXT-") {
				fmt.Fprintf(&old, "-A KUBE-XLB-CDGGSHYLG3RE2FKL -j %s\n", f[0][1:])
			}
		}
		old.WriteString("COMMIT\n")
		put(t, r.dir, "old", old.String())
		if out, err := r.Node.Output("sh", "-c", "iptables-restore --noflush < "+filepath.Join(r.dir, "old")); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		r.objects(webService, webSlice(podIPs[2]))
		r.answers(clusterVIP, podIPs[2])
		r.answers(nodePort, podIPs[2])
		second := strings.NewReplacer("name: web", "name: two", "10.96.0.10", "10.96.0.11", "30080", "30081").Replace(webService)
		r.objects(second, strings.ReplaceAll(strings.ReplaceAll(webSlice(podIPs[1]), "name: web-1", "name: two-1"), "service-name: web", "service-name: two"))
		r.answers("10.96.0.11:80", podIPs[1])
		if _, err := lab.Dial(r.Client, "tcp", "", clusterVIP, lab.NoAnswerTimeout); err == nil {
			t.Error("the deleted Service answers")
		}
		r.end(p)
		p = r.run("iptables")
		r.answers("10.96.0.11:80", podIPs[1])
		r.end(p)
		c := start(t, r.Node, "run", "--cleanup", "--adopt-from-kube-proxy")
		code, _ := c.exit(t)
		if text, err = r.Node.Run(t, "iptables-save", "-t", "nat"); err != nil || code != 0 || strings.Contains(text, "KUBE-S") || strings.Contains(text, "KUBE-X") {
			t.Errorf("--cleanup: exit status %d, error %v, left:\n%s", code, err, text)
		}
	})
}
