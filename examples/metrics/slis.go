package metrics

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/go-proxier/proxier/runner/health"
)

// slis holds the metrics that Kubernetes components serve at /metrics/slis: results of
// their health checks (KEP-3466), with the same names and labels.
//
// kube-proxy exports the answers of /healthz at the port of its metrics, which show only
// that the process answers (kubernetes/kubernetes#113057). slis also exports the health of
// the rules, which /healthz and /livez serve at their own port, with a name that kube-proxy
// does not use.
type slis struct {
	registry *prometheus.Registry
	last     *prometheus.GaugeVec
	answers  *prometheus.CounterVec
}

// The names of the checks: the process answers, and the rules are in effect.
const (
	pingCheck  = "ping"
	rulesCheck = "proxy"
)

func newSLIs() slis {
	registry := prometheus.NewRegistry()
	return slis{
		registry: registry,
		last:     gauge(registry, "kubernetes_healthcheck", "Whether the last request of a health check succeeded", "name", "type"),
		answers:  counter(registry, "kubernetes_healthchecks_total", "Answers of a health check, by status", "name", "type", "status"),
	}
}

func (s slis) observe(name string, c health.Check, code int) {
	kind := "healthz"
	if c == health.Livez {
		kind = "livez"
	}
	value, status := 1.0, "success"
	if code != http.StatusOK {
		value, status = 0, "error"
	}
	s.last.WithLabelValues(name, kind).Set(value)
	s.answers.WithLabelValues(name, kind, status).Inc()
}

// Ping answers "ok", as kube-proxy's /healthz does at the port of the metrics.
func (s *Set) Ping() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s.slis.observe(pingCheck, health.Healthz, http.StatusOK)
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		fmt.Fprint(w, "ok")
	})
}

// SLIHandler serves the results of health checks: /metrics/slis.
func (s *Set) SLIHandler() http.Handler {
	return promhttp.HandlerFor(s.slis.registry, promhttp.HandlerOpts{})
}
