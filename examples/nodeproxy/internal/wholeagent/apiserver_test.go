//go:build linux

package wholeagent

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// cluster is an API server for a test.
type cluster struct {
	*controlplane.Server
	t *testing.T
}

// newCluster starts an API server on a host with an address and more flags, or skips the test. Its
// kubeconfig has the rights of nodeproxy's ServiceAccount.
func newCluster(t *testing.T, h *netlab.Host, addr string, flags ...string) *cluster {
	t.Helper()
	return &cluster{controlplane.New(t, controlplane.Config{
		Host: h, Address: addr, User: "system:serviceaccount:kube-system:nodeproxy", APIServerFlags: append([]string{"--allow-privileged"}, flags...),
	}), t}
}

// newCluster starts an API server on a new host beside the node, with more flags.
func (s *site) newCluster(t *testing.T, flags ...string) *cluster {
	t.Helper()
	control := s.Host("control")
	s.Link(s.Node, "ctl", control, "eth0")
	s.Node.Addrs("ctl", "10.0.0.1/24")
	control.Addrs("eth0", "10.0.0.2/24")
	control.Routes("", "10.0.0.1", "0.0.0.0/0")
	return newCluster(t, control, "10.0.0.2", flags...)
}

// do sends a request that has to succeed: a body is YAML, the answer is put into
// out unless that is nil.
func (c *cluster) do(method, path, body string, out any) {
	c.t.Helper()
	var text []byte
	if body != "" {
		var v any
		if err := yaml.Unmarshal([]byte(body), &v); err != nil {
			c.t.Fatal(err)
		}
		var err error
		if text, err = json.Marshal(v); err != nil {
			c.t.Fatal(err)
		}
	}
	answer, err := c.Request(c.t.Context(), method, path, text)
	if err != nil {
		c.t.Fatal(err)
	}
	if out != nil {
		if err := json.Unmarshal(answer, out); err != nil {
			c.t.Fatalf("%s: %v", answer, err)
		}
	}
}

// validate has the API server look at every object of a file as if it were to be
// created, and accept no field that it does not know.
func (c *cluster) validate(file string) {
	c.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		c.t.Fatal(err)
	}
	n := 0
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var o struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			c.t.Fatal(err)
		}
		path := map[string]string{
			"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts",
			"ConfigMap":          "/api/v1/namespaces/kube-system/configmaps",
			"Service":            "/api/v1/namespaces/kube-system/services",
			"DaemonSet":          "/apis/apps/v1/namespaces/kube-system/daemonsets",
			"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
			"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		}[o.Kind]
		if path == "" {
			c.t.Errorf("%s: what is a %q?", file, o.Kind)
			continue
		}
		c.do("POST", path+"?dryRun=All&fieldValidation=Strict", doc, nil)
		n++
	}
	if n < 2 {
		c.t.Errorf("%s: only %d objects", file, n)
	}
}

// apply creates the ServiceAccounts and the cluster-wide objects of a file with several documents.
func (c *cluster) apply(file string) {
	c.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		c.t.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		for kind, path := range map[string]string{
			"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts",
			"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
			"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		} {
			if strings.Contains(doc, "\nkind: "+kind+"\nmetadata") {
				c.do("POST", path, doc, nil)
			}
		}
	}
}
