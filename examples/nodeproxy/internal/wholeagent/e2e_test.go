//go:build linux

package wholeagent

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"

	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// get sends an HTTP request from a host.
func get(t *testing.T, h *netlab.Host, url string) (code int, body string, header http.Header) {
	t.Helper()
	return h.Get(strings.TrimPrefix(url, "http://"), time.Minute)
}

// eventually waits until f returns true. It calls f less and less often, because f may start
// programs.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	pause := 10 * time.Millisecond
	for end := time.Now().Add(3 * time.Minute); !f(); pause = min(2*pause, 160*time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(pause)
	}
}

const slicesPath = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"

// endpoints returns an EndpointSlice of a Service as YAML. Each item of the list is "ADDRESS
// NODE" or "ADDRESS NODE ZONE", with the zone of a topology hint.
func endpoints(service string, list ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: %s-1, labels: {kubernetes.io/service-name: %s},
  annotations: {endpoints.kubernetes.io/last-change-trigger-time: %q}}, addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [`,
		service, service, time.Now().UTC().Format(time.RFC3339Nano))
	for _, e := range list {
		f := strings.Fields(e)
		fmt.Fprintf(&b, "{addresses: [%s], nodeName: %s, conditions: {ready: true}", f[0], f[1])
		if len(f) > 2 {
			fmt.Fprintf(&b, ", hints: {forZones: [{name: %s}]}", f[2])
		}
		b.WriteString("}, ")
	}
	return b.String() + "]}"
}

// TestEndToEnd runs the agent against a real API server, with only the rights that its
// manifest gives it, and sends packets.
func TestEndToEnd(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.newCluster(t)
	c.applyFile("base/rbac.yaml")
	c.do("POST", "/api/v1/nodes", `{apiVersion: v1, kind: Node, metadata: {name: n1, labels: {topology.kubernetes.io/zone: a}}, spec: {podCIDR: 10.1.0.0/24}}`, nil)
	c.do("PATCH", "/api/v1/nodes/n1/status", `status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}`, nil)
	var web v1.Service
	c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {type: NodePort, ports: [{name: http, port: 80, nodePort: 30080}]}}`, &web)
	c.do("POST", slicesPath, endpoints("web", podIPs[0]+" n1", podIPs[1]+" n2"), nil)
	vip := lab.Port(web.Spec.ClusterIP, "80")

	args := []string{
		"run", "--kubeconfig", c.Kubeconfig(), "--hostname-override", "n1", "--log-every-sync", "--detect-local-mode", "NodeCIDR",
		"--min-sync-period", "0s", "--sync-period", "2s", "--metrics-bind-address", "192.0.2.1:10249", "--profiling",
	}
	p := start(t, s.Node, args...)
	p.line(t)
	s.answeredBy(t, vip, podIPs[:2]...)
	s.answeredBy(t, nodePort, podIPs[:2]...)
	// The client is not a pod, so its connection is masqueraded.
	if _, source, err := lab.Visit(s.Client, "", vip); err != nil || source != "10.1.0.1" {
		t.Errorf("the pod sees %q, error %v", source, err)
	}
	// The ranges of cluster IPs come from the API server, too.
	eventually(t, "an address that no Service has does not answer", func() bool {
		_, err := lab.Dial(s.Client, "tcp", "", "10.96.200.200:80", lab.NoAnswerTimeout)
		return lab.IsTimeout(err)
	})

	c.do("PUT", slicesPath+"/web-1", endpoints("web", podIPs[1]+" n2", podIPs[2]+" n1"), nil)
	eventually(t, "the endpoints change", func() bool { return lab.Visits(s.Client, "", vip, 20).Answered(podIPs[1:]...) })

	// The API server restarts. No connection fails, and no sync writes anything.
	stream := s.streamTo(vip)
	stream.Next(20)
	// Lines may be printed after their changes are in effect.
	for !strings.Contains(p.line(t), " changed=1 ") {
	}
	c.Kill()
	p.logged(t, "cannot read from the API server")
	p.logged(t, "connection refused")
	stream.Next(100)
	must.Do(t, c.Run(t.Context()))
	p.logged(t, "reading from the API server again")
	// Only the new API server has this change, so its line means that all objects were
	// listed again.
	c.do("PUT", slicesPath+"/web-1", endpoints("web", podIPs[0]+" n1", podIPs[1]+" n2"), nil)
	// The counts include the API server's own Service, with one endpoint.
	p.synced(t, "services=2 endpoints=3 changed=1")
	s.answeredBy(t, vip, podIPs[:2]...)
	if n := len(p.lines); n != 0 {
		t.Errorf("%d unexpected syncs, the first: %s", n, <-p.lines)
	}

	// The node moves to another zone.
	c.do("PUT", slicesPath+"/web-1", endpoints("web", podIPs[0]+" n1 a", podIPs[1]+" n2 b"), nil)
	eventually(t, "zone a is served by its own endpoint", func() bool { return lab.Visits(s.Client, "", vip, 20).Answered(podIPs[0]) })
	c.do("PATCH", "/api/v1/nodes/n1", `metadata: {labels: {topology.kubernetes.io/zone: b}}`, nil)
	eventually(t, "zone b by the other", func() bool { return lab.Visits(s.Client, "", vip, 20).Answered(podIPs[1]) })

	// The autoscaler is about to remove the node.
	healthz, livez := "http://192.0.2.1:10256/healthz", "http://192.0.2.1:10256/livez"
	if code, body, _ := get(t, s.Client, healthz); code != 200 || !strings.Contains(body, `"nodeEligible":true`) {
		t.Errorf("/healthz: %d %s", code, body)
	}
	c.do("PATCH", "/api/v1/nodes/n1", `spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}`, nil)
	eventually(t, "the node is not eligible", status(t, s.Client, healthz, 503))
	if code, body, _ := get(t, s.Client, livez); code != 200 {
		t.Errorf("/livez: %d %s", code, body)
	}
	p.watched(t, s.Client)
	if log := p.log(); strings.Count(log, "cannot read from the API server") != 1 || strings.Contains(log, "Event{") || strings.Contains(log, "write event") {
		t.Errorf("more than one line about the outage, or Events that could not be written:\n%s", log)
	}

	// The agent is killed, the objects change, and another agent takes over.
	p.kill(t)
	stream.Next(20)
	c.do("PUT", slicesPath+"/web-1", endpoints("web", podIPs[2]+" n1"), nil)
	c.do("PATCH", "/api/v1/nodes/n1", `spec: {taints: null}`, nil)
	p = start(t, s.Node, args...)
	eventually(t, "the change without an agent is in effect", func() bool { return lab.Visits(s.Client, "", vip, 20).Answered(podIPs[2]) })
	if y := stream.Stop(); len(y.Errs) != 0 {
		t.Errorf("%d connections failed, first: %v", len(y.Errs), y.Errs[0])
	}

	// explain reads the same objects with the same rights.
	e := start(t, s.Node, "explain", "--kubeconfig", c.Kubeconfig(), "--hostname-override", "n1", "--detect-local-mode", "NodeCIDR", "--from", "192.0.2.9", vip)
	if code, out := e.exit(t); code != 0 || !strings.Contains(strings.Join(out, "\n"), "endpoint: "+podIPs[2]+":8080 on node \"n1\", masqueraded") {
		t.Errorf("explain: exit status %d:\n%s\n%s", code, strings.Join(out, "\n"), e.log())
	}

	// The node's pods still have traffic after the Node is deleted.
	c.do("DELETE", "/api/v1/nodes/n1", "", nil)
	eventually(t, "the node is not eligible", status(t, s.Client, healthz, 503))
	s.answeredBy(t, nodePort, podIPs[2])

	// A change of podCIDRs requires a restart.
	c.do("POST", "/api/v1/nodes", `{apiVersion: v1, kind: Node, metadata: {name: n1}, spec: {podCIDR: 10.2.0.0/24}}`, nil)
	if code, _ := p.exit(t); code != 1 || !strings.Contains(p.log(), "podCIDRs changed: restart needed") {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
	}
	s.swap(t, c, vip)
	// Events were written.
	var events v1.EventList
	c.do("GET", "/api/v1/namespaces/default/events", "", &events)
	if !slices.ContainsFunc(events.Items, func(e v1.Event) bool { return e.Reason == core.ReasonStarting && e.InvolvedObject.Name == "n1" }) {
		t.Errorf("no Event %q among %d", core.ReasonStarting, len(events.Items))
	}
	if strings.Contains(p.log(), "forbidden") {
		t.Errorf("a request was forbidden:\n%s", p.log())
	}
}

// swap runs the agent as kubeadm's DaemonSet of kube-proxy does after "kubectl set image", on a
// node with kube-proxy's rules.
func (s *site) swap(t *testing.T, c *cluster, vip string) {
	t.Helper()
	text := must.Get(os.ReadFile("../../../internal/node/config/testdata/kubeadm.yaml"))(t)
	dir := t.TempDir()
	put(t, dir, "config.conf", strings.NewReplacer("/var/lib/kube-proxy/kubeconfig.conf", c.Kubeconfig(), "10.244.0.0/16,fd00:10:244::/56", "10.1.0.0/24").Replace(string(text)))
	if _, err := exec.LookPath("iptables-restore"); err == nil {
		startKubeProxy(t, s.Node, "iptables", false, podIPs[0])
	}
	p := startWith(t, s.Node, []string{asKubeProxyEnv + "=1"}, "--config="+dir+"/config.conf", "--hostname-override=n1")
	p.synced(t, "services=2 endpoints=2 changed=2")
	s.answeredBy(t, vip, podIPs[2])
	eventually(t, "kube-proxy's rules are gone", func() bool { return !rules(t, s.Node)["kube-proxy iptables"] })
	p.logged(t, "called as kube-proxy: --adopt-from-kube-proxy is on by default")
	if p.loggedErrors() {
		t.Errorf("log:\n%s", p.log())
	}
	// kubeadm's pod has kube-proxy's rights, of this role.
	var role rbac.ClusterRole
	c.do("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:node-proxier", "", &role)
	may := map[string]bool{}
	addGrants(may, &role)
	for need := range grants(t, "base/rbac.yaml") {
		if !may[need] {
			t.Errorf("kube-proxy may not %s", need)
		}
	}
}

// watched checks the metrics and the other pages of the metrics server.
func (p *process) watched(t *testing.T, h *netlab.Host) {
	t.Helper()
	const at = "http://192.0.2.1:10249"
	_, text, _ := get(t, h, at+"/metrics")
	for _, want := range []string{
		`kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} `,
		`kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"} `,
		`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} `,
		`kubeproxy_sync_proxy_rules_endpoint_changes_total `,
		`kubeproxy_proxy_healthz_total{code="503"} `,
		`rest_client_requests_total{code="200",host="10.0.0.2:6443",method="GET"} `,
	} {
		_, rest, ok := strings.Cut(text, "\n"+want)
		if value, _, _ := strings.Cut(rest, "\n"); !ok || value == "0" {
			t.Errorf("metric %s is %q", want, value)
		}
	}
	_, text, _ = get(t, h, at+"/configz")
	var z map[string]struct{ Mode, DetectLocalMode string }
	if err := json.Unmarshal([]byte(text), &z); err != nil || z["kubeproxy.config.k8s.io"].DetectLocalMode != "NodeCIDR" {
		t.Errorf("/configz: %v, %s", err, text)
	}
	if code, _, _ := get(t, h, at+"/debug/pprof/cmdline"); code != 200 {
		t.Errorf("/debug/pprof/cmdline: %d", code)
	}
	if p.ProcessState != nil || p.Process.Signal(syscall.Signal(0)) != nil {
		t.Error("the agent ended")
	}
}
