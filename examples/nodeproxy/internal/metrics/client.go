package metrics

import (
	"context"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/tools/metrics"
)

// client is the metrics of requests to the API server, named as Kubernetes
// components name them.
type client struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// WatchClient has the requests to the API server counted. client-go has one place
// for whoever does that in a process, and the first one has it.
func (s *Set) WatchClient() {
	c := client{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rest_client_requests_total", Help: "Requests to the API server, by status code, method and host"}, []string{"code", "method", "host"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "rest_client_request_duration_seconds", Help: "How long requests to the API server took, by verb and host",
			Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60}}, []string{"verb", "host"}),
	}
	s.registry.MustRegister(c.requests, c.duration)
	metrics.Register(metrics.RegisterOpts{RequestResult: c, RequestLatency: c})
}

// Increment counts a request.
func (c client) Increment(_ context.Context, code, method, host string) {
	c.requests.WithLabelValues(code, method, host).Inc()
}

// Observe notes how long a request took.
func (c client) Observe(_ context.Context, verb string, u url.URL, d time.Duration) {
	c.duration.WithLabelValues(verb, u.Host).Observe(d.Seconds())
}
