//go:build linux

package wholeagent

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	rbac "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/must"
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
		Host: h, Address: addr, User: "system:serviceaccount:kube-system:nodeproxy", APIServerFlags: flags,
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
		text = must.Get(yaml.YAMLToJSON([]byte(body)))(c.t)
	}
	answer := must.Get(c.Request(c.t.Context(), method, path, text))(c.t)
	if out != nil {
		if err := json.Unmarshal(answer, out); err != nil {
			c.t.Fatalf("%s: %v", answer, err)
		}
	}
}

// kinds holds the path of each kind of object that the manifests have.
var kinds = map[string]string{
	"ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts", "ConfigMap": "/api/v1/namespaces/kube-system/configmaps",
	"Service": "/api/v1/namespaces/kube-system/services", "DaemonSet": "/apis/apps/v1/namespaces/kube-system/daemonsets",
	"ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles", "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}

// apply creates or changes objects as "kubectl apply --server-side" does, which accepts no unknown field. It returns
// the DaemonSet as the API server has it.
func (c *cluster) apply(documents string) (ds *apps.DaemonSet) {
	c.t.Helper()
	for doc := range strings.SplitSeq(documents, "\n---\n") {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
		}
		must.Do(c.t, yaml.Unmarshal([]byte(doc), &o))
		if o.Kind == "" {
			continue
		}
		if kinds[o.Kind] == "" {
			c.t.Fatalf("what is a %s?", o.Kind)
		}
		answer := must.Get(c.Apply(c.t.Context(), kinds[o.Kind]+"/"+o.Metadata.Name, []byte(doc)))(c.t)
		if o.Kind == "DaemonSet" {
			ds = &apps.DaemonSet{}
			must.Do(c.t, json.Unmarshal(answer, ds))
		}
	}
	return ds
}

// applyFile is apply for a file of the folder deploy.
func (c *cluster) applyFile(file string) {
	c.t.Helper()
	c.apply(string(must.Get(os.ReadFile("../../deploy/" + file))(c.t)))
}

// grants returns what the ClusterRoles in files of the folder deploy allow, as "VERB RESOURCE GROUP".
func grants(t *testing.T, files ...string) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for _, file := range files {
		for _, o := range readObjects(t, file) {
			if role, ok := o.(*rbac.ClusterRole); ok {
				addGrants(out, role)
			}
		}
	}
	return out
}

func addGrants(out map[string]bool, role *rbac.ClusterRole) {
	for _, r := range role.Rules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					out[verb+" "+resource+" "+group] = true
				}
			}
		}
	}
}

// fakeAPI is an API server with at most one object of each kind, as JSON, which do not change.
type fakeAPI struct {
	objects map[string]string
	refuses string // a kind that it answers with 403
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	kind, version := "", strings.TrimPrefix(strings.TrimPrefix(filepath.Dir(r.URL.Path), "/apis/"), "/api/")
	switch filepath.Base(r.URL.Path) {
	case "services":
		kind = "Service"
	case "nodes":
		kind = "Node"
	case "endpointslices":
		kind = "EndpointSlice"
	}
	w.Header().Set("Content-Type", "application/json")
	object := f.objects[kind]
	if name, ok := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name="); ok && !strings.Contains(object, strconv.Quote(name)) {
		object = ""
	}
	switch {
	case r.Method != http.MethodGet || kind == "":
		http.NotFound(w, r)
	case kind == f.refuses:
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":403,"reason":"Forbidden","message":"no"}`)
	case q.Get("watch") == "":
		fmt.Fprintf(w, `{"apiVersion":%q,"kind":"%sList","metadata":{"resourceVersion":"1"},"items":[%s]}`, version, kind, object)
	default:
		if q.Get("sendInitialEvents") == "true" {
			if object != "" {
				fmt.Fprintf(w, `{"type":"ADDED","object":%s}`+"\n", object)
			}
			fmt.Fprintf(w, `{"type":"BOOKMARK","object":{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"1","annotations":{"k8s.io/initial-events-end":"true"}}}}`+"\n", version, kind)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
}
