package health_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

func TestLateUpdateIsUnhealthy(t *testing.T) {
	both := []tracker.Family(nil)
	four, six := []tracker.Family{tracker.IPv4}, []tracker.Family{tracker.IPv6}
	type step struct {
		do   string // queued, started, done, failed, missing
		on   []tracker.Family
		wait time.Duration // before the next
		want bool          // after the wait
	}
	for name, steps := range map[string][]step{
		"nothing ever done": {
			{"queued", both, time.Hour, false},
		},
		"done in time": {
			{"queued", both, 59 * time.Second, false},
			{"started", both, 0, false},
			{"done", both, time.Hour, true},
			{"queued", both, 59 * time.Second, true},
			{"started", both, 999 * time.Millisecond, true},
			{"done", both, time.Hour, true},
		},
		"queued and not begun": {
			{"started", both, 0, false},
			{"done", both, 0, true},
			{"queued", both, time.Minute - 1, true},
			{"queued", both, 1, false},
			{"started", both, 0, false},
			{"done", both, 0, true},
		},
		"a sync that hangs": {
			{"started", both, 0, false},
			{"done", both, 0, true},
			{"started", both, time.Minute, false},
			{"done", both, 0, true},
		},
		"queued during a sync": {
			{"started", both, 0, false},
			{"done", both, 0, true},
			{"started", both, 0, true},
			{"queued", both, 30 * time.Second, true},
			{"done", both, 29 * time.Second, true},
			{"queued", both, time.Second, false},
		},
		"failing": {
			{"started", both, 0, false},
			{"done", both, 0, true},
			{"queued", both, 0, true},
			{"started", both, 0, true},
			{"failed", both, 30 * time.Second, true},
			{"started", both, 0, true},
			{"failed", both, 30 * time.Second, false},
			{"started", both, 0, false},
			{"done", both, 0, true},
		},
		"one family": {
			{"started", both, 0, false},
			{"done", both, 0, true},
			{"queued", both, 0, true},
			{"started", both, 0, true},
			{"done", four, 0, true},
			{"failed", six, time.Minute, false},
			{"started", six, 0, false},
			{"done", six, 0, true},
		},
		"missing rules": {
			{"started", both, 0, false}, {"done", both, 0, true}, {"missing", six, 0, false},
			{"started", both, 0, false}, {"failed", both, 0, false}, {"started", both, 0, false}, {"done", four, 0, false}, {"done", six, 0, true},
		},
		"a family that was never done": {
			{"started", both, 0, false}, {"done", four, 0, false}, {"failed", six, time.Hour, false},
			{"started", six, 0, false}, {"done", six, 0, true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := must.Get(health.NewProxy(health.ProxyConfig{Timeout: time.Minute}))(t)
				for i, s := range steps {
					switch s.do {
					case "queued":
						p.Queued(s.on...)
					case "started":
						p.Started(s.on...)
					case "missing":
						p.Missing(s.on...)
					default:
						p.Done(s.do == "done", s.on...)
					}
					time.Sleep(s.wait)
					if p.Healthy() != s.want {
						t.Fatalf("after step %d (%s, then %v): healthy is %v", i, s.do, s.wait, !s.want)
					}
				}
			})
		})
	}
}

func TestProxyServesStatus(t *testing.T) { synctest.Test(t, servesStatus) }

// servesStatus runs in a bubble, whose time starts at 2000-01-01 00:00.
func servesStatus(t *testing.T) {
	codes := map[health.Check][]int{}
	p, err := health.NewProxy(health.ProxyConfig{
		Timeout:  time.Minute,
		Answered: func(k health.Check, code int) { codes[k] = append(codes[k], code) },
	})
	if err != nil {
		t.Fatal(err)
	}
	tr := p.Hooks()
	ask := func(k health.Check, code int, body string) {
		t.Helper()
		h := p.Livez()
		if k == health.Healthz {
			h = p.Healthz()
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/"+string(k), nil))
		if w.Code != code || w.Header().Get("Content-Type") != "application/json" || w.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d, headers %v, want %d", k, w.Code, w.Header(), code)
		}
		var got, want any
		must.Do(t, json.Unmarshal(w.Body.Bytes(), &got))
		must.Do(t, json.Unmarshal([]byte(body), &want))
		g, _ := json.Marshal(got)
		if w, _ := json.Marshal(want); string(g) != string(w) {
			t.Errorf("%s: %s, want %s", k, g, w)
		}
	}
	// No update is in effect yet.
	ask(health.Healthz, 503, `{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"2000-01-01T00:00:00Z","nodeEligible":true,"healthy":false,"reason":"no sync has succeeded yet"}`)
	ask(health.Livez, 200, `{"lastUpdated":"2000-01-01T00:00:00Z","currentTime":"2000-01-01T00:00:00Z","healthy":true}`)
	p.SetIneligible("the node is not eligible for load-balancer traffic")
	ask(health.Healthz, 503, `{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"2000-01-01T00:00:00Z","nodeEligible":false,"healthy":false,"reason":"the node is not eligible for load-balancer traffic; no sync has succeeded yet"}`)
	p.SetIneligible("")

	// An update takes effect in IPv4 at 0:01, in IPv6 at 0:02.
	time.Sleep(time.Second)
	p.Started()
	p.Done(true, tracker.IPv4)
	time.Sleep(time.Second)
	p.Done(true, tracker.IPv6)
	time.Sleep(time.Second)
	families := func(four, six bool) string {
		return fmt.Sprintf(`"status":{"IPv4":{"lastUpdated":"2000-01-01T00:00:01Z","healthy":%v},"IPv6":{"lastUpdated":"2000-01-01T00:00:02Z","healthy":%v}}}`, four, six)
	}
	ask(health.Healthz, 200, `{"lastUpdated":"2000-01-01T00:00:03Z","currentTime":"2000-01-01T00:00:03Z","nodeEligible":true,"healthy":true,`+families(true, true))
	ask(health.Livez, 200, `{"lastUpdated":"2000-01-01T00:00:03Z","currentTime":"2000-01-01T00:00:03Z","healthy":true,`+families(true, true))
	p.SetIneligible("the node is not eligible for load-balancer traffic")
	ask(health.Healthz, 503, `{"lastUpdated":"2000-01-01T00:00:02Z","currentTime":"2000-01-01T00:00:03Z","nodeEligible":false,"healthy":true,"reason":"the node is not eligible for load-balancer traffic",`+families(true, true))
	ask(health.Livez, 200, `{"lastUpdated":"2000-01-01T00:00:03Z","currentTime":"2000-01-01T00:00:03Z","healthy":true,`+families(true, true))
	p.SetIneligible("")

	// First IPv4 waits too long, then both do.
	p.Queued(tracker.IPv4)
	time.Sleep(time.Minute)
	late := `{"lastUpdated":"2000-01-01T00:00:02Z","currentTime":"2000-01-01T00:01:03Z",`
	ask(health.Livez, 503, late+`"healthy":false,"reason":"an update in IPv4 waits for 1m0s",`+families(false, true))
	ask(health.Healthz, 503, late+`"nodeEligible":true,"healthy":false,"reason":"an update in IPv4 waits for 1m0s",`+families(false, true))
	tr.SyncStart(runner.RunInfo{})
	tr.SyncDone(runner.RunInfo{Err: errors.New("no")})
	time.Sleep(time.Minute)
	ask(health.Livez, 503, `{"lastUpdated":"2000-01-01T00:00:02Z","currentTime":"2000-01-01T00:02:03Z","healthy":false,"reason":"an update in IPv6 waits for 1m0s",`+families(false, false))

	// One Service that cannot be programmed leaves the proxy healthy.
	tr.SyncStart(runner.RunInfo{})
	tr.SyncDone(runner.RunInfo{Err: &ruleset.PartialError{Failed: map[tracker.Key]error{{}: errors.New("no")}}})
	if !p.Healthy() {
		t.Error("unhealthy after a PartialError")
	}
	if got, want := fmt.Sprint(codes), "map[healthz:[503 503 200 503 503] livez:[200 200 200 503 503]]"; got != want {
		t.Errorf("Answered got %v, want %v", got, want)
	}
}

func TestInvalidProxyConfigIsRejected(t *testing.T) {
	for _, c := range []health.ProxyConfig{{}, {Timeout: -1}, {Timeout: 1, Families: []tracker.Family{5}}} {
		if _, err := health.NewProxy(c); err == nil {
			t.Errorf("%+v: error %v", c, err)
		}
	}
}

func TestWhyIneligible(t *testing.T) {
	now := metav1.Now()
	for _, tt := range []struct {
		node *v1.Node
		want bool
	}{
		{nil, false},
		{&v1.Node{}, true},
		{&v1.Node{Spec: v1.NodeSpec{Taints: []v1.Taint{{Key: "node.kubernetes.io/not-ready"}}}}, true},
		{&v1.Node{Spec: v1.NodeSpec{Taints: []v1.Taint{{}, {Key: "ToBeDeletedByClusterAutoscaler"}}}}, false},
		{&v1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}, false},
	} {
		if why := health.WhyIneligible(tt.node); (why == "") != tt.want {
			t.Errorf("%v: %q", tt.node, why)
		}
	}
}
