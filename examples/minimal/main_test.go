//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
)

// agentEnv makes the test program the agent.
const agentEnv = "MINIMAL_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(agentEnv) != "" {
		main()
		return
	}
	netlab.Main(m)
}

// world is a node with an API server, two pods and a client.
type world struct {
	t                  *testing.T
	node, client, pods *netlab.Host
	api                *controlplane.Server
	kubeconfig         string
	agent              *exec.Cmd
	log                *logs
}

// logs holds what the agents write.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

const podPorts = "8080"

// unusedIP is in the range of cluster IPs and belongs to no Service. The node has a route for it, to a host
// that answers.
const unusedIP = "10.96.99.99"

func newWorld(t *testing.T) *world {
	lab, hosts := netlab.NewHosts(t, "node", "pods", "client", "control")
	w := &world{t: t, node: hosts["node"], client: hosts["client"], pods: hosts["pods"], log: &logs{}}
	for i, name := range []string{"pods", "client", "control"} {
		lab.Link(w.node, name, hosts[name], "eth0")
		w.node.Addrs(name, fmt.Sprintf("10.%d.0.1/24", i+1))
		hosts[name].Addrs("eth0", fmt.Sprintf("10.%d.0.2/24", i+1))
		hosts[name].Routes("", fmt.Sprintf("10.%d.0.1", i+1), "0.0.0.0/0")
	}
	w.pods.Addrs("eth0", "10.1.0.3/24", unusedIP+"/32")
	w.node.Routes("", "10.1.0.2", unusedIP+"/32")
	w.node.Forward()
	w.pods.ServeTCP(t, unusedIP+":80", func(c net.Conn) { io.WriteString(c, "routed") })
	for _, addr := range []string{"10.1.0.2", "10.1.0.3"} {
		w.pods.ServeTCP(t, addr+":"+podPorts, func(c net.Conn) { io.WriteString(c, addr) })
		w.pods.ServeUDP(t, addr+":"+podPorts, addr)
	}
	w.api = controlplane.New(t, controlplane.Config{
		Host: hosts["control"], Address: "10.3.0.2", User: "system:serviceaccount:kube-system:minimal",
	})
	w.kubeconfig = w.api.Kubeconfig()
	deploy := must.Get(os.ReadFile("deploy.yaml"))(t)
	for doc := range strings.SplitSeq(string(deploy), "---\n") {
		kind := regexp.MustCompile(`(?m)^kind: (\w+)$`).FindStringSubmatch(doc)[1]
		w.apply(map[string]string{
			"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts/minimal",
			"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles/minimal",
			"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/minimal",
			"DaemonSet":          "/apis/apps/v1/namespaces/kube-system/daemonsets/minimal",
		}[kind], doc)
	}
	w.apply("/api/v1/nodes/node-a", "apiVersion: v1\nkind: Node\nmetadata: {name: node-a}")
	t.Cleanup(func() {
		if w.agent != nil {
			w.kill(syscall.SIGKILL)
		}
		if t.Failed() {
			t.Logf("log of the agents:\n%s", w.log)
		}
	})
	return w
}

func (w *world) apply(path, object string) {
	w.t.Helper()
	if _, err := w.api.Apply(w.t.Context(), path, []byte(object)); err != nil {
		w.t.Fatal(err)
	}
}

// service creates or changes a Service of TCP and UDP port 80 with one endpoint on the node.
func (w *world) service(name, spec, endpoint string) {
	w.t.Helper()
	w.apply("/api/v1/namespaces/default/services/"+name, `
apiVersion: v1
kind: Service
metadata: {name: `+name+`}
spec:
  ports: [{name: tcp, port: 80, targetPort: `+podPorts+`}, {name: udp, port: 80, targetPort: `+podPorts+`, protocol: UDP}]
  `+strings.ReplaceAll(spec, "\n", "\n  "))
	w.apply("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/"+name, `
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: `+name+`, labels: {kubernetes.io/service-name: `+name+`}}
addressType: IPv4
ports: [{name: tcp, port: `+podPorts+`}, {name: udp, port: `+podPorts+`, protocol: UDP}]
endpoints: [{addresses: [`+endpoint+`], nodeName: node-a}]`)
}

// start starts the agent and waits until it is healthy.
func (w *world) start() {
	w.t.Helper()
	w.agent = exec.Command("/proc/self/exe", "--kubeconfig", w.kubeconfig, "--node", "node-a", "--pod-cidr", "10.1.0.0/24")
	w.agent.Env = append(os.Environ(), agentEnv+"=1")
	w.agent.Stdout, w.agent.Stderr = w.log, w.log
	must.Do(w.t, w.node.Start(w.agent))
	w.until("healthy", func() bool { code, _, _ := w.node.Get("127.0.0.1:10256/healthz", testtime.Timeout); return code == 200 })
}

// kill ends the agent by a signal and returns its exit status.
func (w *world) kill(s syscall.Signal) int {
	w.agent.Process.Signal(s)
	w.agent.Wait()
	code := w.agent.ProcessState.ExitCode()
	w.agent = nil
	return code
}

func (w *world) until(what string, f func() bool) {
	w.t.Helper()
	for end := time.Now().Add(testtime.Timeout); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("not %s in time", what)
		}
	}
}

// ask returns which pod answers a new connection or datagram, or an error.
func (w *world) ask(ctx context.Context, network, to string) (string, error) {
	c, err := w.client.Dial(ctx, network, "", to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return w.answer(c, network)
}

func (w *world) answer(c net.Conn, network string) (string, error) {
	c.SetDeadline(time.Now().Add(testtime.Timeout))
	if network == "udp" {
		if _, err := c.Write([]byte("?")); err != nil {
			return "", err
		}
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// TestAgent starts the agent with the rights of deploy.yaml at a real API server.
func TestAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.service("web", "clusterIP: 10.96.0.10", "10.1.0.2")
	w.service("lb", "type: LoadBalancer\nclusterIP: 10.96.0.11\nexternalTrafficPolicy: Local\nhealthCheckNodePort: 30111\nexternalIPs: [203.0.113.1]", "10.1.0.2")
	w.service("other", "clusterIP: 10.96.0.12\nexternalIPs: [203.0.113.1]", "10.1.0.3") // lb is older, or first by name
	if got, err := w.ask(t.Context(), "tcp", unusedIP+":80"); got != "routed" || err != nil {
		t.Fatalf("without an agent, the unused cluster IP: %q, %v", got, err)
	}
	w.start()
	ask := func(network, to, want string) {
		t.Helper()
		var got string
		var err error
		w.until(to+" answered by "+want, func() bool {
			got, err = w.ask(t.Context(), network, to)
			return got == want && err == nil
		})
	}
	ask("tcp", "10.96.0.10:80", "10.1.0.2")
	ask("udp", "10.96.0.10:80", "10.1.0.2")
	ask("tcp", "203.0.113.1:80", "10.1.0.2")
	// The API server's own ServiceCIDR reaches the rules: a packet to an unused cluster IP is dropped, and no
	// longer routed.
	w.until("dropped", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := w.ask(ctx, "tcp", unusedIP+":80")
		return err != nil && ctx.Err() != nil
	})
	if code, page, _ := w.client.Get("10.2.0.1:30111/", testtime.Timeout); code != 200 || !strings.Contains(page, `"localEndpoints":1`) {
		t.Errorf("health-check node port: %d %s", code, page)
	}
	if code, page, _ := w.node.Get("127.0.0.1:10256/livez", testtime.Timeout); code != 200 {
		t.Errorf("/livez: %d %s", code, page)
	}
	_, page, _ := w.node.Get("127.0.0.1:10249/metrics", testtime.Timeout)
	for _, name := range []string{
		"sync_proxy_rules_service_changes_total", "sync_proxy_rules_endpoint_changes_total", `sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"}`,
		`sync_full_proxy_rules_duration_seconds_count{ip_family="IPv6"}`, `proxy_healthz_total{code="200"}`,
	} {
		if !regexp.MustCompile(`(?m)^kubeproxy_` + regexp.QuoteMeta(name) + ` [1-9]`).MatchString(page) {
			t.Errorf("/metrics has no %s", name)
		}
	}
	w.until("an Event about the external IP", func() bool {
		answer, err := w.api.Request(t.Context(), "GET", "/api/v1/namespaces/default/events", nil)
		var list struct{ Items []struct{ Reason string } }
		if err != nil || json.Unmarshal(answer, &list) != nil {
			t.Fatalf("%s: %v", answer, err)
		}
		for _, e := range list.Items {
			if e.Reason == "ProxyFrontendConflict" {
				return true
			}
		}
		return false
	})

	// A change moves an open UDP flow, which the kernel keeps at its endpoint otherwise.
	flow := must.Get(w.client.Dial(t.Context(), "udp", "", "10.96.0.10:80"))(t)
	defer flow.Close()
	if got, err := w.answer(flow, "udp"); got != "10.1.0.2" || err != nil {
		t.Errorf("the flow is answered by %q, %v", got, err)
	}
	w.service("web", "clusterIP: 10.96.0.10", "10.1.0.3")
	ask("tcp", "10.96.0.10:80", "10.1.0.3")
	w.until("the flow moved", func() bool {
		got, err := w.answer(flow, "udp")
		return got == "10.1.0.3" && err == nil
	})

	// Another process deletes the rules.
	must.Do(t, nftables.Cleanup(t.Context(), nftables.Config{NetNS: w.node.File()}))
	ask("tcp", "10.96.0.10:80", "10.1.0.3")

	// /healthz tells load balancers to leave the node, whose pods stay reachable.
	w.apply("/api/v1/nodes/node-a", "apiVersion: v1\nkind: Node\nmetadata: {name: node-a}\nspec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}")
	w.until("ineligible", func() bool {
		var code int
		code, page, _ = w.node.Get("127.0.0.1:10256/healthz", testtime.Timeout)
		return code == 503
	})
	if !strings.Contains(page, "ToBeDeletedByClusterAutoscaler") {
		t.Errorf("/healthz does not say why: %s", page)
	}

	if code := w.kill(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d after SIGTERM", code)
	}
	ask("tcp", "10.96.0.10:80", "10.1.0.3")
	if s := w.log.String(); strings.Contains(s, "sync failed") || strings.Contains(s, "level=ERROR") {
		t.Error("the log has an error") // it is printed
	}
}

// TestKillsLoseNoConnection kills the agent four times and starts it again, while clients connect and a
// Service changes. No connection may fail.
func TestKillsLoseNoConnection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.service("web", "clusterIP: 10.96.0.10", "10.1.0.2")
	w.start()
	w.until("served", func() bool { _, err := w.ask(t.Context(), "tcp", "10.96.0.10:80"); return err == nil })
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var asked, lost atomic.Int64
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				asked.Add(1)
				if _, err := w.ask(t.Context(), "tcp", "10.96.0.10:80"); err != nil {
					lost.Add(1)
					t.Errorf("a connection was lost: %v", err)
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for i := range 4 {
		w.kill(syscall.SIGKILL)
		endpoint := fmt.Sprint("10.1.0.", 2+i%2)
		w.service("web", "clusterIP: 10.96.0.10", endpoint)
		w.start()
		w.until("moved", func() bool {
			got, err := w.ask(t.Context(), "tcp", "10.96.0.10:80")
			return err == nil && got == endpoint
		})
	}
	cancel()
	wg.Wait()
	t.Logf("%d connections, %d lost", asked.Load(), lost.Load())
	if asked.Load() < 100 {
		t.Errorf("only %d connections", asked.Load())
	}
}
