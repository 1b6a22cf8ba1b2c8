package core

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/tracker"
)

// pagesOf returns the metrics server of an agent that does not run.
func pagesOf(t *testing.T) func(path, accept string) *http.Response {
	t.Helper()
	c := configtest.Parsed(t, []string{"run", "--manifests", "x", "--hostname-override", "n1", "--feature-gates", "ComponentFlagz=true,ComponentStatusz=true"})
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
