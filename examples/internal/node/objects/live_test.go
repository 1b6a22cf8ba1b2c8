package objects

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
)

// TestPeekNamesWhyItCannotRead asks API servers that refuse or do not answer, for all resources or for one.
func TestPeekNamesWhyItCannotRead(t *testing.T) {
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	forbid := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"not allowed","code":403}`))
	}
	for name, tt := range map[string]struct {
		args  []string
		fails func(path string) bool
		how   http.HandlerFunc
		want  string
	}{
		"all hang":                 {nil, func(string) bool { return true }, hang, "no answer yet"},
		"all are forbidden":        {nil, func(string) bool { return true }, forbid, "not allowed"},
		"slices are forbidden":     {nil, func(p string) bool { return strings.Contains(p, "slices") }, forbid, "cannot read endpointslices: not allowed"},
		"the Node is forbidden":    {[]string{"--detect-local-mode", "NodeCIDR"}, func(p string) bool { return strings.HasSuffix(p, "/n") }, forbid, "not allowed"},
		"the Node is not answered": {[]string{"--detect-local-mode", "NodeCIDR"}, func(p string) bool { return strings.HasSuffix(p, "/n") }, hang, "context deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if tt.fails(r.URL.Path) {
					tt.how(w, r)
					return
				}
				kinds := map[string]string{"services": "v1 Service", "endpointslices": "discovery.k8s.io/v1 EndpointSlice", "nodes": "v1 Node", "servicecidrs": "networking.k8s.io/v1 ServiceCIDR"}
				version, kind, _ := strings.Cut(kinds[filepath.Base(r.URL.Path)], " ")
				w.Header().Set("Content-Type", "application/json")
				if r.URL.Query().Get("watch") == "" {
					w.Write([]byte(`{"kind":"` + kind + `List","apiVersion":"` + version + `","metadata":{"resourceVersion":"1"},"items":[]}`))
					return
				}
				w.Write([]byte(`{"type":"BOOKMARK","object":{"kind":"` + kind + `","apiVersion":"` + version + `","metadata":{"resourceVersion":"1","annotations":{"k8s.io/initial-events-end":"true"}}}}` + "\n"))
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			}))
			t.Cleanup(s.CloseClientConnections)
			kubeconfig := filepath.Join(t.TempDir(), "k")
			text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"" + s.URL + "\"}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
			if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			cfg := configtest.Parsed(t, append([]string{"run", "--kubeconfig", kubeconfig, "--hostname-override", "n"}, tt.args...))
			_, err := Peek(t.Context(), cfg, slog.New(slog.DiscardHandler))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %s", err, tt.want)
			}
		})
	}
}
