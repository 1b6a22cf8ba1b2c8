package health_test

import (
	"fmt"
	"net/http/httptest"
	"time"

	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
)

// Serve /healthz from the hooks that a runner would call.
func Example() {
	proxy, err := health.NewProxy(health.ProxyConfig{Timeout: time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	hooks := proxy.Trace() // a runner gets it as runner.Config.Trace
	hooks.Queued(time.Now())
	hooks.SyncStart(runner.Info{})
	hooks.SyncDone(runner.Info{})

	healthz := func() int {
		w := httptest.NewRecorder()
		proxy.Healthz().ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
		return w.Code
	}
	fmt.Println(healthz())
	proxy.SetEligible(false) // the autoscaler is about to remove the node
	fmt.Println(healthz(), proxy.Healthy())
	// Output:
	// 200
	// 503 true
}
