package metrics

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/feature"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // registers rest_client_*
	_ "k8s.io/component-base/metrics/prometheus/version"    // registers kubernetes_build_info
)

// processGatherer returns the gatherer of the metrics that describe the whole process:
// those that k8s.io/component-base registers in its global registry.
func processGatherer() prometheus.Gatherer { return legacyregistry.DefaultGatherer }

// RecordFeature sets kubernetes_feature_enabled for one feature gate. stage is "ALPHA",
// "BETA", "DEPRECATED", or "" for a gate that is generally available. The metric belongs
// to the process, not to a [Set].
func RecordFeature(ctx context.Context, name, stage string, enabled bool) {
	feature.RecordFeatureInfo(ctx, name, stage, enabled)
}
