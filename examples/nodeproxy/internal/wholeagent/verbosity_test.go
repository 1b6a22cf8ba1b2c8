//go:build linux

package wholeagent

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// healthChecked is webService with a health-check node port.
const healthChecked = `apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  externalTrafficPolicy: Local
  healthCheckNodePort: 30081
  ports:
  - {name: http, port: 80, nodePort: 30080}
`

// TestVerbosityChangesAtRunTime changes --v of a running agent, without one of its pages.
func TestVerbosityChangesAtRunTime(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	put(t, dir, "web.yaml", healthChecked+"---\n"+webSlice(podIPs[0]))
	p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period=0", "--profiling", "--metrics-bind-address=192.0.2.1:10249",
		"--feature-gates=ComponentFlagz=false")
	p.synced(t, "services=1 endpoints=1 changed=1")

	tr := &http.Transport{DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
		return s.Client.Dial(ctx, network, "", to)
	}}
	defer tr.CloseIdleConnections()
	ask := func(method, body string) int {
		t.Helper()
		r := must.Get(http.NewRequestWithContext(t.Context(), method, "http://192.0.2.1:10249/debug/flags/v", strings.NewReader(body)))(t)
		answer, err := tr.RoundTrip(r)
		if err != nil {
			return 0 // the server is not up yet
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	eventually(t, "GET is rejected", func() bool { return ask(http.MethodGet, "") == http.StatusNotAcceptable })
	if code := ask(http.MethodPut, "many"); code != http.StatusBadRequest {
		t.Errorf("a bad verbosity: status %d", code)
	}
	if code, _, _ := get(t, s.Client, "http://192.0.2.1:10249/flagz"); code != http.StatusNotFound {
		t.Errorf("/flagz is served without its feature gate: status %d", code)
	}
	if code, text, _ := get(t, s.Client, "http://192.0.2.1:10249/statusz"); code != 200 || strings.Contains(text, "/flagz") || !strings.Contains(text, "/debug/flags/v") {
		t.Errorf("/statusz: status %d\n%s", code, text)
	}
	const debug = `"closed a health-check node port"`
	rollOut(t, dir, podIPs[0])
	p.synced(t, "services=1 endpoints=1 changed=1")
	put(t, dir, "web.yaml", healthChecked+"---\n"+webSlice(podIPs[0]))
	p.synced(t, "services=1 endpoints=1 changed=1")
	if strings.Contains(p.log(), debug) {
		t.Errorf("logged at --v=0:\n%s", p.log())
	}
	if code := ask(http.MethodPut, "4"); code != http.StatusOK {
		t.Errorf("a good verbosity: status %d", code)
	}
	rollOut(t, dir, podIPs[0])
	p.logged(t, debug)
}

// TestJSONInfosGoToStandardOutput also checks that errors go to standard error, and that the
// buffer of standard output is flushed.
func TestJSONInfosGoToStandardOutput(t *testing.T) {
	t.Parallel()
	s, dir := webSite(t, podIPs[0])
	p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--cleanup",
		"--feature-gates=LoggingAlphaOptions=true", "--logging-format=json", "--log-json-split-stream", "--log-json-info-buffer-size=64Ki", "--log-flush-frequency=1h")
	code, out := p.exit(t)
	if code != 0 || p.log() != "" || len(out) == 0 {
		t.Errorf("exit status %d, standard output %q, standard error:\n%s", code, out, p.log())
	}
	for _, line := range out {
		var info struct {
			Msg    string
			Caller string
		}
		if err := json.Unmarshal([]byte(line), &info); err != nil || info.Msg == "" || !strings.HasPrefix(info.Caller, "run/") {
			t.Errorf("error %v: %s", err, line)
		}
	}
}
