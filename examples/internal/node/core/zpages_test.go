package core

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	flagzapi "k8s.io/apiserver/pkg/server/flagz/api/v1beta1"
	statuszapi "k8s.io/apiserver/pkg/server/statusz/api/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/tracker"
)

// pagesOf returns the metrics server of an agent that does not run.
func pagesOf(t *testing.T) func(path, accept string) *http.Response {
	t.Helper()
	c := configtest.Parsed(t, []string{"run", "--manifests", "x", "--hostname-override", "n1"})
	a := &Agent{World: &objects.World{Config: c}, options: Options{Component: "nodeproxy", Version: "v0.0.0"}, families: []tracker.Family{tracker.IPv4}, started: time.Now().Add(-90 * time.Second)}
	mux := http.NewServeMux()
	a.addPages(mux)
	return func(path, accept string) *http.Response {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		if accept != "" {
			r.Header.Set("Accept", accept)
		}
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		return w.Result()
	}
}

// TestPagesAnswerByAccept compares the answers with those of kube-proxy 1.37.2 to the same
// headers: the status, the Content-Type and the Warning.
func TestPagesAnswerByAccept(t *testing.T) {
	get := pagesOf(t)
	const text = "text/plain; charset=utf-8"
	for _, tt := range []struct {
		path, accept string
		code         int
		kind         string // the Content-Type
		deprecated   bool
	}{
		{"/flagz", "", 200, text, false},
		{"/flagz", "*/*", 200, text, false},
		{"/flagz", "text/*", 200, text, false},
		{"/flagz", "text/plain;charset=utf-8", 200, text, false},
		{"/statusz", "application/json,text/plain;q=0.5", 200, text, false},
		{"/statusz", "text/plain;q=0", 406, "application/json", false},
		{"/statusz", "text/html", 406, "application/json", false},
		{"/statusz", "application/*", 406, "application/json", false},
		{"/statusz", "application/json", 406, "application/json", false},
		{"/flagz", "text/plain;v=v1beta1;g=config.k8s.io;as=Flagz", 406, "application/json", false},
		{"/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz", 406, "application/json", false},
		{"/flagz", "application/json;v=v1;g=config.k8s.io;as=Flagz", 406, "application/json", false},
		{"/flagz", "application/cbor;v=v1beta1;g=config.k8s.io;as=Flagz", 406, "application/json", false},
		{"/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz", 200, "application/json;g=config.k8s.io;v=v1beta1;as=Flagz", false},
		{"/flagz", "application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz", 200, "application/yaml;g=config.k8s.io;v=v1beta1;as=Flagz", false},
		{"/flagz", "application/json;v=v1alpha1;g=config.k8s.io;as=Flagz", 200, "application/json;g=config.k8s.io;v=v1alpha1;as=Flagz", true},
		{"/flagz", "application/xml, application/json;v=v1beta1;g=config.k8s.io;as=Flagz", 200, "application/json;g=config.k8s.io;v=v1beta1;as=Flagz", false},
		{"/statusz", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz", 200, "application/json;g=config.k8s.io;v=v1beta1;as=Statusz", false},
		{"/statusz", "application/yaml;v=v1beta1;g=config.k8s.io;as=Statusz", 200, "application/yaml;g=config.k8s.io;v=v1beta1;as=Statusz", false},
		{"/statusz", "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz", 200, "application/json;g=config.k8s.io;v=v1alpha1;as=Statusz", true},
	} {
		r := get(tt.path, tt.accept)
		if r.StatusCode != tt.code || r.Header.Get("Content-Type") != tt.kind || (r.Header.Get("Warning") != "") != tt.deprecated {
			t.Errorf("%s Accept: %s: status %d, want %d; header %v, want Content-Type %s, Warning %v", tt.path, tt.accept, r.StatusCode, tt.code, r.Header, tt.kind, tt.deprecated)
		}
		if tt.code == http.StatusNotAcceptable {
			var s metav1.Status
			if err := json.NewDecoder(r.Body).Decode(&s); err != nil || s.Kind != "Status" || s.Reason != metav1.StatusReasonNotAcceptable {
				t.Errorf("%s Accept: %s: error %v, answer %+v", tt.path, tt.accept, err, s)
			}
		}
	}
}

// TestPagesAreObjectsForPrograms decodes the pages strictly, as the types that Kubernetes
// publishes for them.
func TestPagesAreObjectsForPrograms(t *testing.T) {
	get := pagesOf(t)
	read := func(path, form, version, kind string, out any) {
		t.Helper()
		var text strings.Builder
		r := get(path, "application/"+form+";g=config.k8s.io;v="+version+";as="+kind)
		if err := r.Write(&text); err != nil {
			t.Fatal(err)
		}
		_, body, _ := strings.Cut(text.String(), "\r\n\r\n")
		if err := yaml.UnmarshalStrict([]byte(body), out); err != nil {
			t.Errorf("%s: %v\n%s", path, err, body)
		}
		if isJSON := json.Valid([]byte(body)); isJSON != (form == "json") {
			t.Errorf("%s: form %s, JSON %v:\n%s", path, form, isJSON, body)
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
			if s.Kind != "Statusz" || s.APIVersion != "config.k8s.io/"+v || s.Name != "nodeproxy" || s.UptimeSeconds < 90 || s.StartTime.After(time.Now()) ||
				s.EmulationVersion != config.Kubernetes || s.BinaryVersion != "v0.0.0" || s.GoVersion == "" || !slices.Contains(s.Paths, "/metrics/slis") || slices.Contains(s.Paths, "/debug/pprof/") {
				t.Errorf("%+v", s)
			}
		}
	}
}
