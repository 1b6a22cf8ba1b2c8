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

	"go.yaml.in/yaml/v3"

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
		path := kinds[o.Kind]
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
		for _, kind := range []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding"} {
			if strings.Contains(doc, "\nkind: "+kind+"\nmetadata") {
				c.do("POST", kinds[kind], doc, nil)
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
