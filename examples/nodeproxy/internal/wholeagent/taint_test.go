//go:build linux

package wholeagent

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
)

const startupTaint = "go-proxier.github.io/not-ready"

// TestStartupTaintIsRemovedWhenServicesWork runs the agent against a real API server, with the
// rights and the policy of the component startup-taint. The taint stays while the agent cannot read
// the objects and while it lacks the right, and is removed once a Service works, and again after
// the Node registered again.
func TestStartupTaintIsRemovedWhenServicesWork(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	c := s.newCluster(t)
	const component = "components/startup-taint/"
	const tainted = `spec: {taints: [{key: ` + startupTaint + `, effect: NoExecute}, {key: example.com/other, effect: NoSchedule}, {key: ` + startupTaint + `, effect: NoSchedule}]}`
	for _, n := range []string{"n1", "n2"} {
		c.do("POST", "/api/v1/nodes", `{apiVersion: v1, kind: Node, metadata: {name: `+n+`}, `+tainted+`}`, nil)
	}
	c.do("PATCH", "/api/v1/nodes/n1/status", `status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}`, nil)
	// The API server adds taints of its own.
	taints := func(name string) (out []string) {
		t.Helper()
		var n v1.Node
		c.do("GET", "/api/v1/nodes/"+name, "", &n)
		for _, taint := range n.Spec.Taints {
			out = append(out, taint.Key)
		}
		return out
	}
	has := func(name string) bool { t.Helper(); return slices.Contains(taints(name), startupTaint) }
	c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10, ports: [{name: http, port: 80}]}}`, nil)
	c.do("POST", slicesPath, endpoints("web", podIPs[0]+" n1"), nil)
	// Only the Node and events can be used at first.
	const some = "/apis/rbac.authorization.k8s.io/v1/clusterrole"
	c.do("POST", some+"s", `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: some}, rules: [
  {apiGroups: [""], resources: [nodes], verbs: [list, watch]}, {apiGroups: [""], resources: [events], verbs: [create, patch, update]}]}`, nil)
	c.do("POST", some+"bindings", `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: some},
  roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: some}, subjects: [{kind: ServiceAccount, name: nodeproxy, namespace: kube-system}]}`, nil)

	// The token of a pod names its node. Here an administrator acts as such a pod.
	text := must.Get(os.ReadFile(c.Kubeconfig()))(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	as := strings.Replace(string(text), "{token: user-token}", "{token: admin-token, as: 'system:serviceaccount:kube-system:nodeproxy', as-user-extra: {authentication.kubernetes.io/node-name: [n1]}}", 1)
	must.Do(t, os.WriteFile(kubeconfig, []byte(as), 0o600))
	p := start(t, s.Node, "run", "--kubeconfig", kubeconfig, "--hostname-override", "n1", "--remove-startup-taint", startupTaint)
	p.logged(t, "cannot read from the API server") // Services or EndpointSlices
	if !has("n1") {
		t.Error("the taint is removed while the agent has no rules")
	}
	c.applyFile("base/rbac.yaml")
	p.logged(t, "cannot remove the startup taint")
	if !has("n1") {
		t.Error("the taint is removed without the right")
	}
	c.applyFile(component + "rbac.yaml")
	eventually(t, "the taint is removed", func() bool { return !has("n1") })
	// Services work immediately.
	if pod, _, err := lab.Visit(s.Client, "", clusterVIP); err != nil || pod != podIPs[0] {
		t.Errorf("%q, %v", pod, err)
	}
	if got := taints("n1"); !slices.Contains(got, "example.com/other") {
		t.Errorf("other taints are gone: %q", got)
	}
	eventually(t, "events of the node", func() bool {
		var events v1.EventList
		c.do("GET", "/api/v1/namespaces/default/events", "", &events)
		reasons := map[string]bool{}
		for _, e := range events.Items {
			reasons[e.Reason] = e.InvolvedObject.Name == "n1"
		}
		return reasons["StartupTaintNotRemoved"] && reasons["StartupTaintRemoved"]
	})

	// With the policy the agent may change its own Node, and only its taints.
	text = must.Get(os.ReadFile("../../deploy/" + component + "policy.yaml"))(t)
	policy, binding, _ := strings.Cut(string(text), "\n---\n")
	const admission = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
	c.do("POST", admission+"ies?fieldValidation=Strict", policy, nil)
	c.do("POST", admission+"ybindings?fieldValidation=Strict", binding, nil)
	rc := must.Get(kubeapi.ClientConfig(componentbase.ClientConnectionConfiguration{Kubeconfig: kubeconfig, QPS: 100, Burst: 100}, ""))(t)
	rc.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
		return s.Node.Dial(ctx, network, "", to)
	}
	pod := must.Get(kubeapi.NewClient(rc))(t)
	var other v1.Node
	c.do("GET", "/api/v1/nodes/n2", "", &other)
	refused := func() bool {
		err := pod.RemoveTaint(t.Context(), &other, startupTaint)
		if err == nil { // the policy was not in effect
			c.do("PATCH", "/api/v1/nodes/n2", tainted, nil)
			c.do("GET", "/api/v1/nodes/n2", "", &other)
		} else if !apierrors.IsForbidden(err) {
			t.Fatal(err)
		}
		return err != nil
	}
	eventually(t, "the policy protects other Nodes", refused)
	// The Node registers again.
	c.do("PATCH", "/api/v1/nodes/n1", tainted, nil)
	eventually(t, "the taint is removed again", func() bool { return !has("n1") })
	if !has("n2") {
		t.Error("the other node lost its taint")
	}
}
