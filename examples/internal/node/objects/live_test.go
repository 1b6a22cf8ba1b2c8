package objects

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
)

func forbid(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusForbidden)
	w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"not allowed","code":403}`))
}

// standIn returns the configuration for an API server that has one object, a ServiceCIDR. It answers requests
// whose path fails selects by how.
func standIn(t *testing.T, fails func(path string) bool, how http.HandlerFunc, args ...string) *config.Config {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fails(r.URL.Path) {
			if how(w, r); r.Context().Err() != nil || w.Header().Get("Content-Type") != "" {
				return
			}
		}
		kinds := map[string]string{"services": "v1 Service", "endpointslices": "discovery.k8s.io/v1 EndpointSlice", "nodes": "v1 Node", "servicecidrs": "networking.k8s.io/v1 ServiceCIDR"}
		version, kind, _ := strings.Cut(kinds[filepath.Base(r.URL.Path)], " ")
		item := ""
		if kind == "ServiceCIDR" {
			item = `{"kind":"ServiceCIDR","apiVersion":"networking.k8s.io/v1","metadata":{"name":"kubernetes","resourceVersion":"1"},"spec":{"cidrs":["10.96.0.0/16"]}}`
		}
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") == "" {
			w.Write([]byte(`{"kind":"` + kind + `List","apiVersion":"` + version + `","metadata":{"resourceVersion":"1"},"items":[` + item + `]}`))
			return
		}
		if item != "" && r.URL.Query().Get("sendInitialEvents") == "true" {
			w.Write([]byte(`{"type":"ADDED","object":` + item + "}\n"))
		}
		w.Write([]byte(`{"type":"BOOKMARK","object":{"kind":"` + kind + `","apiVersion":"` + version + `","metadata":{"resourceVersion":"1","annotations":{"k8s.io/initial-events-end":"true"}}}}` + "\n"))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(s.CloseClientConnections)
	kubeconfig := filepath.Join(t.TempDir(), "k")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"" + s.URL + "\"}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
	must.Do(t, os.WriteFile(kubeconfig, []byte(text), 0o600))
	return configtest.Parsed(t, append([]string{"run", "--kubeconfig", kubeconfig, "--hostname-override", "n"}, args...))
}

// TestPeekWaitsForServiceCIDRs lets the API server answer about ServiceCIDRs later than about all other resources,
// and refuse them.
func TestPeekWaitsForServiceCIDRs(t *testing.T) {
	late := func(http.ResponseWriter, *http.Request) { time.Sleep(500 * time.Millisecond) }
	for name, tt := range map[string]struct {
		how  http.HandlerFunc
		want int
	}{"late": {late, 1}, "forbidden": {forbid, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := standIn(t, func(p string) bool { return strings.HasSuffix(p, "/servicecidrs") }, tt.how)
			w := must.Get(Peek(t.Context(), cfg, slog.New(slog.DiscardHandler)))(t)
			if got := w.Engine.Snapshot().Node.ServiceCIDRs; len(got) != tt.want {
				t.Errorf("ranges %v, want %d", got, tt.want)
			}
		})
	}
}

// TestPeekNamesWhyItCannotRead asks API servers that refuse or do not answer, for all resources or for one.
func TestPeekNamesWhyItCannotRead(t *testing.T) {
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	fail := func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "", http.StatusInternalServerError) }
	var all sync.WaitGroup
	defer all.Wait()
	for name, tt := range map[string]struct {
		args  []string
		fails func(path string) bool
		how   http.HandlerFunc
		want  string
	}{
		"all hang":                 {nil, func(string) bool { return true }, hang, "no answer yet"},
		"all are forbidden":        {nil, func(string) bool { return true }, forbid, "not allowed"},
		"slices are forbidden":     {nil, func(p string) bool { return strings.Contains(p, "slices") }, forbid, "cannot read endpointslices: not allowed"},
		"ServiceCIDRs fail":        {nil, func(p string) bool { return strings.Contains(p, "servicecidrs") }, fail, "cannot read servicecidrs: an error on the server"},
		"the Node is forbidden":    {[]string{"--detect-local-mode", "NodeCIDR"}, func(p string) bool { return strings.HasSuffix(p, "/n") }, forbid, "not allowed"},
		"the Node is not answered": {[]string{"--detect-local-mode", "NodeCIDR"}, func(p string) bool { return strings.HasSuffix(p, "/n") }, hang, "context deadline exceeded"},
	} {
		cfg := standIn(t, tt.fails, tt.how, tt.args...)
		all.Go(func() { // not t.Parallel, which allows as many as there are processors
			_, err := Peek(t.Context(), cfg, slog.New(slog.DiscardHandler))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: error %v, want %s", name, err, tt.want)
			}
		})
	}
}
