package metrics_test

import (
	"fmt"
	"net/http/httptest"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/tracker"
)

// A Set counts a received Service and serves the metrics.
func Example() {
	set := metrics.NewSet(metrics.Config{Mode: "nftables", Families: []tracker.Family{tracker.IPv4}})
	set.ReceiveService(types.NamespacedName{Namespace: "shop", Name: "web"}, func() (changed bool) {
		return true // an agent passes the Service to its tracker here
	})

	w := httptest.NewRecorder()
	set.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, "kubeproxy_sync_proxy_rules_service_changes") {
			fmt.Print(line)
		}
	}
	// Output:
	// kubeproxy_sync_proxy_rules_service_changes_pending 1
	// kubeproxy_sync_proxy_rules_service_changes_total 1
}
