package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/go-proxier/proxier/runner/health"
)

// slis is what Kubernetes components serve at /metrics/slis: how their health
// checks were answered (KEP-3466), under the same names and labels.
type slis struct {
	registry *prometheus.Registry
	last     *prometheus.GaugeVec
	answers  *prometheus.CounterVec
}

// checkName is what the agent's one check, of the rules, is called there.
const checkName = "proxy"

func newSLIs() slis {
	s := slis{
		registry: prometheus.NewRegistry(),
		last:     prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "kubernetes", Name: "healthcheck", Help: "Whether a health check succeeded when it was last asked for"}, []string{"name", "type"}),
		answers:  prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kubernetes", Name: "healthchecks_total", Help: "Answers of a health check, by status"}, []string{"name", "type", "status"}),
	}
	s.registry.MustRegister(s.last, s.answers)
	return s
}

func (s slis) observe(c health.Check, code int) {
	kind := "healthz"
	if c == health.Livez {
		kind = "livez"
	}
	value, status := 1.0, "success"
	if code != http.StatusOK {
		value, status = 0, "error"
	}
	s.last.WithLabelValues(checkName, kind).Set(value)
	s.answers.WithLabelValues(checkName, kind, status).Inc()
}

// SLIHandler serves the results of health checks: /metrics/slis.
func (s *Set) SLIHandler() http.Handler {
	return promhttp.HandlerFor(s.slis.registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
}
