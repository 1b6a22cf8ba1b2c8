// Package newest compares the agent with what only the newest Kubernetes publishes. Its module requires
// that release, and that of the examples the oldest one that they support.
package newest

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	flagzapi "k8s.io/apiserver/pkg/server/flagz/api/v1beta1"
	statuszapi "k8s.io/apiserver/pkg/server/statusz/api/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestPagesAreObjectsForPrograms decodes the pages strictly, as the types that Kubernetes
// publishes for them.
func TestPagesAreObjectsForPrograms(t *testing.T) {
	c := must.Get(agent.ParseArgs([]string{"--manifests", t.TempDir(), "--hostname-override", "n1", "--proxy-mode", "nftables"}, nil))(t)
	a := must.Get(agent.New(t.Context(), agent.Options{Config: c, Version: "v0.0.0", Backend: agent.Discard}))(t)
	defer a.Close()
	read := func(path, form, version, kind string, out any) {
		t.Helper()
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Header.Set("Accept", "application/"+form+";g=config.k8s.io;v="+version+";as="+kind)
		w := httptest.NewRecorder()
		a.Metrics().ServeHTTP(w, r)
		if err := yaml.UnmarshalStrict(w.Body.Bytes(), out); err != nil {
			t.Errorf("%s: %v\n%s", path, err, w.Body)
		}
		if isJSON := json.Valid(w.Body.Bytes()); isJSON != (form == "json") {
			t.Errorf("%s: form %s, JSON %v:\n%s", path, form, isJSON, w.Body)
		}
	}
	for _, form := range []string{"json", "yaml"} {
		for _, v := range []string{"v1alpha1", "v1beta1"} {
			var f flagzapi.Flagz
			read("/flagz", form, v, "Flagz", &f)
			if f.Kind != "Flagz" || f.APIVersion != "config.k8s.io/"+v || f.Name != "nodeproxy" || f.Flags["proxy-mode"] != "nftables" || f.Flags["masquerade-all"] != "false" {
				t.Errorf("%+v", f)
			}
			if value, ok := f.Flags["kubeconfig"]; !ok || value != "" {
				t.Errorf("the empty flag is %q, %v", value, ok)
			}
			var s statuszapi.Statusz
			read("/statusz", form, v, "Statusz", &s)
			if s.Kind != "Statusz" || s.APIVersion != "config.k8s.io/"+v || s.Name != "nodeproxy" || s.UptimeSeconds < 0 || s.StartTime.After(time.Now()) ||
				s.EmulationVersion != agent.Kubernetes || s.BinaryVersion != "v0.0.0" || s.GoVersion == "" || !slices.Contains(s.Paths, "/metrics/slis") || slices.Contains(s.Paths, "/debug/pprof/") {
				t.Errorf("%+v", s)
			}
		}
	}
}
