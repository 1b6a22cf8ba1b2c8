//go:build linux

package wholeagent

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/internal/testing/testtime"
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
		must.Do(c.t, yaml.Unmarshal([]byte(body), &v))
		var err error
		if text, err = json.Marshal(v); err != nil {
			c.t.Fatal(err)
		}
	}
	answer := must.Get(c.Request(c.t.Context(), method, path, text))(c.t)
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
	text := must.Get(os.ReadFile(file))(c.t)
	n := 0
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var o struct{ Kind string }
		must.Do(c.t, yaml.Unmarshal([]byte(doc), &o))
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
	text := must.Get(os.ReadFile(file))(c.t)
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

// TestOutageOfTheAPIServer stops the API server, for long enough that the pauses between
// two attempts have grown. The agent logs the cause and keeps the rules, follows the API server
// after its return, and ends after a signal during an outage. The long form runs without other
// tests and checks that the cause is logged within 5 seconds, and that the agent ends within 3. The
// periods in which this machine stood still do not count. Package kubeapi has such a test with a
// synthetic clock.
func TestOutageOfTheAPIServer(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute; run without -short")
	}
	outage, alone := 8*time.Second, testtime.Thorough()
	if alone {
		outage = 2 * time.Minute
	} else {
		t.Parallel()
	}
	stalls := stall.Start()
	defer stalls.Stop()
	within := func(limit time.Duration, what string, from time.Time) {
		t.Helper()
		now := time.Now()
		running := stalls.Running(from, now)
		n, total := stalls.Stalls()
		t.Logf("%s after %v, without stalls %v; %d stalls of %v in the test so far", what, now.Sub(from), running, n, total)
		if alone && running > limit {
			t.Errorf("%s after %v, want %v at most", what, running, limit)
		}
	}
	s := newSite(t)
	c := s.newCluster(t)
	c.apply("../../deploy/base/rbac.yaml")
	p := start(t, s.Node, "run", "--kubeconfig", c.Kubeconfig(), "--hostname-override", "n1", "--min-sync-period", "0s")
	add := func(name string) string {
		var created v1.Service
		c.do("POST", "/api/v1/namespaces/default/services", fmt.Sprintf(`{apiVersion: v1, kind: Service, metadata: {name: %s}, spec: {ports: [{name: http, port: 80}]}}`, name), &created)
		c.do("POST", slicesPath, endpoints(name, podIPs[0]+" n1"), nil)
		return lab.Port(created.Spec.ClusterIP, "80")
	}
	first := add("first")
	served := func(what, addr string) {
		t.Helper()
		eventually(t, what, func() bool { return lab.Visits(s.Client, "", addr, 1).Answered(podIPs[0]) })
	}
	served("the first Service is served", first)

	c.Kill()
	down := time.Now()
	p.logged(t, "cannot read from the API server")
	within(5*time.Second, "the outage is in the log", down)
	if !strings.Contains(p.log(), "connection refused") {
		t.Errorf("no cause in the log:\n%s", p.log())
	}
	time.Sleep(outage - time.Since(down))
	if y := lab.Visits(s.Client, "", first, 5); !y.Answered(podIPs[0]) {
		t.Error("the rules did not stay in effect")
	}
	must.Do(t, c.Run(t.Context()))
	up := time.Now()
	second := add("second")
	served("the new Service is served", second)
	t.Logf("a new Service is served %v after the API server is ready", time.Since(up))
	p.logged(t, "reading from the API server again")
	if n := strings.Count(p.log(), "cannot read from the API server"); n > 1+int(time.Since(down)/time.Minute) {
		t.Errorf("%d lines about one outage of %v:\n%s", n, time.Since(down), p.log())
	}

	c.Kill()
	time.Sleep(outage / 2)
	end := time.Now()
	must.Do(t, p.Process.Signal(syscall.SIGTERM))
	if code, _ := p.exit(t); code != 0 {
		t.Errorf("exit status %d", code)
	}
	within(3*time.Second, "the agent ended", end)
	if strings.Contains(p.log(), "Event{") || strings.Contains(p.log(), "write event") {
		t.Errorf("Events that could not be written are in the log:\n%s", p.log())
	}
}
