package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // registers rest_client_*
)

// processGatherer returns the gatherer of the metrics of the whole process, which
// k8s.io/component-base registers in its global registry.
func processGatherer() prometheus.Gatherer { return legacyregistry.DefaultGatherer }
