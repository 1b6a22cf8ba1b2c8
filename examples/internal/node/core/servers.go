package core

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/runner/health"
)

// restartPeriod is how long after a failure a server is restarted, as in kube-proxy.
const restartPeriod = 5 * time.Second

// The names of the servers.
const (
	healthzServer = "healthz"
	metricsServer = "metrics"
	readyzServer  = "readyz"
)

// server is an HTTP server that is restarted when it fails.
type server struct {
	name, addr  string
	handler     http.Handler
	connections int
	// hardFail makes the first failure end the agent.
	hardFail bool
	listen   func(ctx context.Context, network, address string) (net.Listener, error)
	// listener is the listener to use first. If it is nil, serve opens one.
	listener net.Listener
	// failed is called with each failure that is not that of the attempt before.
	failed func(error)
	log    *slog.Logger
	// last is the failure of the last attempt, or "".
	last string
}

// readyz answers 200 if the rules are in effect and follow the objects. kube-proxy has no such
// page. So a probe of it does not take a kube-proxy that still holds the port for the agent.
func (a *Agent) readyz(w http.ResponseWriter, _ *http.Request) {
	select {
	case <-a.inEffect:
		if a.Proxy.Healthy() {
			writeText(w, http.StatusOK, "ok")
			return
		}
	default:
	}
	writeText(w, http.StatusServiceUnavailable, "the rules are not in effect")
}

func writeText(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	fmt.Fprint(w, text)
}

// identified adds the header by which another agent recognizes answers of this one.
func (a *Agent) identified(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(takeover.InstanceHeader, a.instance)
		h.ServeHTTP(w, r)
	})
}

// run serves until ctx ends.
func (s *server) run(ctx context.Context) error {
	for {
		err := s.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		err = fmt.Errorf("%s at %s: %w", s.name, s.addr, err)
		if s.last != err.Error() { // a kube-proxy may have the port for days
			s.last = err.Error()
			s.failed(err)
			if s.hardFail {
				return err
			}
			s.log.Error("a server failed and will be restarted: this line is not repeated for the same error", "server", s.name, "address", s.addr, "every", restartPeriod.String(), "error", err)
		}
		if sleep(ctx, restartPeriod) != nil {
			return nil
		}
	}
}

func (s *server) serve(ctx context.Context) (err error) {
	l := s.listener
	s.listener = nil
	if l == nil {
		if l, err = s.listen(ctx, "tcp", s.addr); err != nil {
			return err
		}
	}
	if s.last != "" {
		s.last = ""
		s.log.Info("the server listens", "server", s.name, "address", s.addr)
	}
	hs := health.NewServerFor(s.handler, s.connections, s.log)
	ended := make(chan error, 1)
	go func() { ended <- hs.Serve(l) }()
	select {
	case err = <-ended:
		return err
	case <-ctx.Done():
	}
	down, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	if hs.Shutdown(down) != nil {
		hs.Close()
	}
	return <-ended
}

// HealthzHandler serves /healthz, /livez and /readyz.
func (a *Agent) HealthzHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/healthz", a.Proxy.Healthz())
	mux.Handle("/livez", a.Proxy.Livez())
	mux.HandleFunc("/readyz", a.readyz)
	return a.identified(mux)
}

// MetricsHandler serves the metrics and the other pages of kube-proxy's metrics server.
func (a *Agent) MetricsHandler() http.Handler {
	mux := http.NewServeMux()
	gatherers := prometheus.Gatherers{a.metrics.Registry()}
	if a.options.Gatherer != nil {
		gatherers = append(gatherers, a.options.Gatherer)
	}
	mux.Handle("/metrics", promhttp.HandlerFor(gatherers, promhttp.HandlerOpts{}))
	mux.Handle("/metrics/slis", a.metrics.SLIHandler())
	a.addPages(mux)
	mux.Handle("/healthz", a.metrics.Ping())
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) {
		writeText(w, http.StatusOK, a.Config.Mode)
	})
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// An error means that the client has disconnected.
		_ = json.NewEncoder(w).Encode(map[string]*v1alpha1.KubeProxyConfiguration{v1alpha1.GroupName: a.Config.Effective})
	})
	if a.options.Debug != nil {
		mux.Handle("/debug/", a.options.Debug)
	}
	return a.identified(mux)
}

// listenWithin returns a function that opens the health-check node ports of Services within the limit
// of listening sockets, for [health.NodePortsConfig].Listen.
func listenWithin(l *modes.Limits, listen func(ctx context.Context, network, address string) (net.Listener, error)) func(ctx context.Context, network, address string) (net.Listener, error) {
	return func(ctx context.Context, network, address string) (net.Listener, error) {
		if !l.Take() {
			return nil, fmt.Errorf("%d ports are open, which RLIMIT_NOFILE allows", l.Sockets)
		}
		inner, err := listen(ctx, network, address)
		if err != nil {
			l.Give()
			return nil, err
		}
		return &countedListener{Listener: inner, give: sync.OnceFunc(l.Give)}, nil
	}
}

// countedListener counts as open until it is closed.
type countedListener struct {
	net.Listener
	give func()
}

func (c *countedListener) Close() error {
	c.give()
	return c.Listener.Close()
}
