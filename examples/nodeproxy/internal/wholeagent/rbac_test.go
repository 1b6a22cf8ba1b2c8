//go:build linux

package wholeagent

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// auditPolicy makes the API server log each request of the ServiceAccount.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: ["system:serviceaccount:kube-system:nodeproxy"]}
- {level: None}
`

// TestRBACIsWhatTheAgentUses runs the agent with the token of a pod, in every mode that works here
// and with every option that sends requests of its own. The audit log must have a request for each
// verb of the ClusterRoles, and none that was denied.
func TestRBACIsWhatTheAgentUses(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	audit := filepath.Join(dir, "audit.log")
	put(t, dir, "policy.yaml", auditPolicy)
	c := s.newCluster(t, "--audit-policy-file="+filepath.Join(dir, "policy.yaml"), "--audit-log-path="+audit)
	const component = "components/startup-taint/"
	roles := []string{"base/rbac.yaml", component + "rbac.yaml"}
	for _, file := range roles {
		c.applyFile(file)
	}
	c.do("POST", "/api/v1/nodes", `{apiVersion: v1, kind: Node, metadata: {name: n1}, spec: {podCIDR: 10.1.0.0/24, taints: [{key: `+startupTaint+`, effect: NoSchedule}]}}`, nil)
	c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10, ports: [{name: http, port: 80}]}}`, nil)
	c.do("POST", slicesPath, endpoints("web", podIPs[0]+" n1"), nil)
	put(t, dir, "token", c.podToken("n1"))
	put(t, dir, "kubeconfig", `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "https://10.0.0.2:6443", insecure-skip-tls-verify: true}}],
users: [{name: u, user: {tokenFile: token}}], contexts: [{name: c, context: {cluster: c, user: u}}], current-context: c}`)
	config := func(fields string) {
		put(t, dir, "config.yaml", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclientConnection: {kubeconfig: "+dir+"/kubeconfig}\n"+fields)
	}
	args := []string{"--config", filepath.Join(dir, "config.yaml"), "--hostname-override", "n1"}
	run := func(env []string, more ...string) *process {
		t.Helper()
		p := startWith(t, s.Node, env, append(append([]string{"run"}, args...), more...)...)
		eventually(t, "the Service is served", func() bool { _, _, err := lab.Visit(s.Client, "", clusterVIP); return err == nil })
		return p
	}
	end := func(p *process) {
		t.Helper()
		p.Process.Signal(os.Interrupt)
		if code, _ := p.exit(t); code != 0 {
			t.Errorf("exit status %d, log:\n%s", code, p.log())
		}
		cleanup(t, s.Node)
	}

	const nftables = "mode: nftables\ndetectLocalMode: NodeCIDR\n"
	config(nftables)
	p := run(nil, "--remove-startup-taint", startupTaint)
	p.logged(t, "removed the startup taint")
	e := start(t, s.Node, append(append([]string{"explain"}, args...), clusterVIP)...)
	if code, out := e.exit(t); code != 0 {
		t.Errorf("explain: exit status %d:\n%s\n%s", code, strings.Join(out, "\n"), e.log())
	}
	// The recorder patches an Event that repeats.
	for n, invalid := range []string{"nodePortAddresses: [x]\n", "nodePortAddresses: [x] # again\n"} {
		config(nftables + invalid)
		eventually(t, "the file is reported", func() bool {
			return strings.Count(p.log(), "the changed configuration file is invalid") == n+1
		})
	}
	eventually(t, "the Event is patched", func() bool { return requests(t, audit)["patch events "] })
	config(nftables)
	end(p)
	for _, mode := range []string{"iptables", "userspace"} {
		config("mode: " + mode + "\n")
		// Lists are requested where the API server does not stream them.
		p := run([]string{"KUBE_FEATURE_WatchListClient=false"})
		p.logged(t, "mode=\""+mode+"\"")
		end(p)
	}

	used := requests(t, audit)
	for what := range grants(t, roles...) {
		if !used[what] {
			t.Errorf("granted, and not used: %s", what)
		}
	}
}

// requests returns what an audit log has, as "VERB RESOURCE GROUP". None may be denied.
func requests(t *testing.T, audit string) map[string]bool {
	t.Helper()
	text := must.Get(os.ReadFile(audit))(t)
	out := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		var e struct {
			Verb, RequestURI string
			ObjectRef        struct{ APIGroup, Resource string }
			Annotations      map[string]string
		}
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if d := e.Annotations["authorization.k8s.io/decision"]; d != "allow" {
			t.Fatalf("%s %s: decision %q", e.Verb, e.RequestURI, d)
		}
		out[e.Verb+" "+e.ObjectRef.Resource+" "+e.ObjectRef.APIGroup] = true
	}
	return out
}

// podToken creates a pod of nodeproxy on a node, and returns its token.
func (c *cluster) podToken(node string) string {
	c.t.Helper()
	const path = "/api/v1/namespaces/kube-system/"
	var pod v1.Pod
	c.do("POST", path+"pods", `{apiVersion: v1, kind: Pod, metadata: {name: nodeproxy}, spec: {serviceAccountName: nodeproxy, nodeName: `+node+`, containers: [{name: nodeproxy, image: nodeproxy}]}}`, &pod)
	var token struct{ Status struct{ Token string } }
	c.do("POST", path+"serviceaccounts/nodeproxy/token", fmt.Sprintf(`{apiVersion: authentication.k8s.io/v1, kind: TokenRequest, spec: {boundObjectRef: {apiVersion: v1, kind: Pod, name: %s, uid: %s}}}`, pod.Name, pod.UID), &token)
	return token.Status.Token
}
