//go:build linux

package wholeagent

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// report is a node with a folder of manifests, on which public reports are played, one after the other.
type report struct {
	*site
	t     *testing.T // of the report
	all   *testing.T // of all reports
	dir   string
	mode  string
	flags []string
	agent *process
}

// objects replaces the manifests.
func (r *report) objects(manifests ...string) {
	r.t.Helper()
	put(r.t, r.dir, "objects.yaml", strings.Join(manifests, "---\n"))
}

// applied replaces the manifests and waits until they are in effect.
func (r *report) applied(manifests ...string) {
	r.t.Helper()
	for len(r.agent.lines) != 0 {
		<-r.agent.lines
	}
	r.objects(manifests...)
	r.agent.line(r.t)
}

// run starts the agent, after the end of one that runs, and waits until the manifests are in effect.
func (r *report) run(flags ...string) { r.t.Helper(); r.runBy(embed, flags...) }

func (r *report) runBy(start func(*testing.T, *netlab.Host, ...string) *process, flags ...string) {
	r.t.Helper()
	if r.agent != nil {
		r.agent.stop(r.t)
	}
	r.agent = start(r.all, r.Node, slices.Concat([]string{"run", "--manifests", r.dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", r.mode}, r.flags, flags)...)
	r.agent.line(r.t)
}

// must runs a program on a host.
func (r *report) must(h *netlab.Host, name string, args ...string) string {
	r.t.Helper()
	out, err := h.Run(r.t, name, args...)
	if err != nil {
		r.t.Fatalf("%v\n%s", err, out)
	}
	return out
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
	c := must.Get(lab.Dial(r.Client, "udp", "", "10.96.0.53:53", testtime.Timeout))(r.t)
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

// TestPublicReports plays reports of other proxies' operators. Where it can, one agent serves for several.
func TestPublicReports(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, "iptables")
			r := &report{site: newSite(t), t: t, all: t, dir: t.TempDir(), mode: mode,
				flags: []string{"--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "azv", "--sync-period", "1s"}}
			play := func(name string, f func(t *testing.T)) {
				t.Run(name, func(t *testing.T) {
					r.t = t
					f(t)
				})
			}
			at := []string{"--nodeport-addresses", "192.0.2.0/24"}
			// Interfaces of pods that do not exist yet.
			play("kubernetes-134024", func(t *testing.T) {
				r.objects(webService, webSlice(podIPs[0]))
				r.run(at...)
				r.answers(clusterVIP, podIPs[0])
				r.answers(nodePort, podIPs[0])
			})
			lb := strings.Replace(webService, "  type: NodePort\n", "  type: LoadBalancer\n  externalTrafficPolicy: Local\n", 1)
			local := strings.ReplaceAll(webSlice(podIPs[0]), "- addresses: ["+podIPs[0]+"]", "- {addresses: ["+podIPs[0]+"], nodeName: n1}")
			// The node gets and loses addresses: the health check follows them, stays after a restart, and
			// is not left when the Service has none. UDP flows stay with their endpoint at the restart.
			play("calico-8112 kubernetes-122740", func(t *testing.T) {
				checked := strings.Replace(lb, "  externalTrafficPolicy: Local\n", "  externalTrafficPolicy: Local\n  healthCheckNodePort: 32000\n", 1)
				dns := dnsService + "---\n" + dnsSlice(podIPs...)
				r.applied(checked, local, dns)
				check := func(addr string) int { code, _, _ := get(t, r.Client, "http://"+addr+":32000/"); return code }
				eventually(t, "the check answers", func() bool { return check("192.0.2.1") == 200 })
				r.must(r.Node, "ip", "addr", "add", "192.0.2.3/24", "dev", "eth0")
				eventually(t, "the check answers at the new address", func() bool { return check("192.0.2.3") == 200 })
				r.must(r.Node, "ip", "addr", "del", "192.0.2.3/24", "dev", "eth0")
				var asks []func() string
				var names []string
				for range 10 {
					asks = append(asks, r.asked())
					names = append(names, asks[len(asks)-1]())
				}
				r.run(at...)
				eventually(t, "the check still answers", func() bool { return check("192.0.2.1") == 200 })
				time.Sleep(time.Second) // a clean-up follows the sync
				for i, ask := range asks {
					if now := ask(); now != names[i] {
						t.Errorf("flow %d: %s, before %s", i, now, names[i])
					}
				}
				r.applied(webService, local)
				eventually(t, "the port is closed", func() bool { return check("192.0.2.1") == 0 })
				if r.agent.loggedErrors() {
					t.Error(r.agent.log())
				}
			})
			// A client keeps its UDP socket while the proxy stands still and the only endpoint is replaced.
			play("kubernetes-125467", func(t *testing.T) {
				r.objects(dnsService, dnsSlice(podIPs[0]))
				r.runBy(start, at...)
				ask := r.asked()
				ask()
				r.agent.Process.Signal(syscall.SIGSTOP)
				r.objects(dnsService, dnsSlice(podIPs[1]))
				ask()
				r.agent.Process.Signal(syscall.SIGCONT)
				eventually(t, "the new endpoint answers", func() bool { return ask() == podIPs[1] })
			})
			// The host's firewall drops what it forwards, as docker's does. Mode nftables cannot accept packets
			// there, and names the chain.
			play("k3s-8706", func(t *testing.T) {
				r.applied(webService, webSlice(podIPs[0]))
				r.answers(nodePort, podIPs[0])
				r.must(r.Node, "iptables", "-P", "FORWARD", "DROP")
				if mode == "iptables" {
					r.answers(nodePort, podIPs[0])
					return
				}
				r.run(at...)
				r.agent.logged(t, "chain FORWARD of iptables drops packets")
				r.agent.logged(t, "IPv4: -P FORWARD DROP")
				r.unanswered(t, nodePort)
			})
			if mode == "nftables" {
				// localhost comes into nodePortAddresses by a restart.
				play("kubernetes-142183", func(t *testing.T) {
					for flags, served := range map[string]bool{
						"primary,localhost": true, "primary": false, "localhost": true, "all": false,
						"localhost --feature-gates KubeProxyNFTablesLocalhostNodePorts=false": false,
					} {
						r.run(append([]string{"--nodeport-addresses"}, strings.Fields(flags)...)...)
						eventually(t, flags, func() bool {
							got := r.reached("tcp", "127.0.0.1:30080")
							return got == podIPs[0] && served || strings.Contains(got, "refused") && !served
						})
					}
				})
				return
			}
			// A chain of an older kube-proxy jumps to the chains of Services and endpoints.
			play("kubernetes-132516", func(t *testing.T) {
				nat := func() string { return r.must(r.Node, "iptables-save", "-t", "nat") }
				var old strings.Builder
				old.WriteString("*nat\n:KUBE-XLB-CDGGSHYLG3RE2FKL - [0:0]\n")
				for line := range strings.Lines(nat()) {
					if f := strings.Fields(line); strings.HasPrefix(line, ":KUBE-SEP-") || strings.HasPrefix(line, ":KUBE-SVC-") || strings.HasPrefix(line, ":KUBE-EXT-") {
						fmt.Fprintf(&old, "-A KUBE-XLB-CDGGSHYLG3RE2FKL -j %s\n", f[0][1:])
					}
				}
				old.WriteString("COMMIT\n")
				put(t, r.dir, "old", old.String())
				r.must(r.Node, "sh", "-c", "iptables-restore --noflush < "+filepath.Join(r.dir, "old"))
				r.applied(webService, webSlice(podIPs[2]))
				r.answers(clusterVIP, podIPs[2])
				r.answers(nodePort, podIPs[2])
				second := strings.NewReplacer("name: web", "name: two", "10.96.0.10", "10.96.0.11", "30080", "30081").Replace(webService)
				r.applied(second, strings.ReplaceAll(strings.ReplaceAll(webSlice(podIPs[1]), "name: web-1", "name: two-1"), "service-name: web", "service-name: two"))
				r.answers("10.96.0.11:80", podIPs[1])
				if _, err := lab.Dial(r.Client, "tcp", "", clusterVIP, lab.NoAnswerTimeout); err == nil {
					t.Error("the deleted Service answers")
				}
				r.run(at...)
				r.answers("10.96.0.11:80", podIPs[1])
				r.agent.stop(t)
				code, _, _ := verb(t, r.Node, "run", "--cleanup", "--adopt-from-kube-proxy")
				if text := nat(); code != 0 || strings.Contains(text, "KUBE-S") || strings.Contains(text, "KUBE-X") {
					t.Errorf("--cleanup: exit status %d, left:\n%s", code, text)
				}
			})
		})
	}
}
