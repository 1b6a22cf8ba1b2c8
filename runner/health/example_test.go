package health_test

import (
	"fmt"
	"net/http/httptest"
	"time"

	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
)

// A runner tells the Proxy what it does, and the Proxy answers probes.
func Example() {
	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	hooks := proxy.Trace() // for runner.Config.Trace
	hooks.Queued(time.Now())
	hooks.SyncStart(runner.Info{})
	hooks.SyncDone(runner.Info{})

	ask := func() int {
		w := httptest.NewRecorder()
		proxy.Healthz().ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
		return w.Code
	}
	fmt.Println(ask())
	proxy.SetEligible(false) // the autoscaler is about to remove the node
	fmt.Println(ask(), proxy.Healthy())
	// Output:
	// 200
	// 503 true
}
