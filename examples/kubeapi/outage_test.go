package kubeapi

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2/textlogger"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// handlerOf returns a Handler that calls seen for each object and each list.
func handlerOf(seen func(what string)) Handler {
	return Handler{
		SetService: func(*v1.Service) { seen("service") }, DeleteService: func(types.NamespacedName) {},
		SetSlice: func(*discovery.EndpointSlice) { seen("slice") }, DeleteSlice: func(types.NamespacedName) {},
		SetNode: func(*v1.Node) { seen("node") }, DeleteNode: func() {},
		SetServiceCIDR: func(*networking.ServiceCIDR) { seen("cidr") }, DeleteServiceCIDR: func(string) {},
		Synced: func(s Source) { seen("synced " + string(s)) },
	}
}

// follow calls Follow with an API server at a URL until the test calls stop, which returns
// after Follow.
func follow(t *testing.T, url string, log *slog.Logger, seen func(string)) (stop func()) {
	t.Helper()
	return followBy(t, &rest.Config{Host: url}, log, handlerOf(seen))
}

// followBy is follow with a client configuration and a Handler.
func followBy(t *testing.T, config *rest.Config, log *slog.Logger, h Handler) (stop func()) {
	t.Helper()
	config.QPS, config.Burst = 1e6, 1e6
	c := must.Get(NewClient(config))(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { Follow(ctx, c, tracker.Selector{}, "n", h, log) })
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

// lines is a log that a test reads line by line.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	for line := range bytes.Lines(p) {
		select {
		case l <- string(line):
		default:
		}
	}
	return len(p), nil
}

// answer writes a Status with an HTTP status code.
func answer(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q,"message":"it is %s"}`, code, reason, reason)
}

// serveLists answers lists with one object, and refuses watches as an API server does that
// cannot stream lists.
func serveLists(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("watch") != "" {
		answer(w, http.StatusUnprocessableEntity, "Invalid")
		return
	}
	kinds := map[string]string{"services": "v1 Service", "endpointslices": "discovery.k8s.io/v1 EndpointSlice", "nodes": "v1 Node", "servicecidrs": "networking.k8s.io/v1 ServiceCIDR"}
	p := strings.Split(r.URL.Path, "/")
	version, kind, _ := strings.Cut(kinds[p[len(p)-1]], " ")
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"kind":"%sList","apiVersion":%q,"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a","namespace":"b"}}]}`, kind, version)
}

// apiServer is an API server in this process.
type apiServer func(*http.Request) (*http.Response, error)

func (f apiServer) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestFollowLogsAnOutageInTimeAndReturnsWithItsContext follows API servers that do not serve, on the
// clock of package synctest, which a busy machine does not affect. The log must have the cause
// within 5 seconds, and after that at most one line a minute. When its context ends, Follow must
// return within a second, even after an outage in which the pauses between attempts have grown.
func TestFollowLogsAnOutageInTimeAndReturnsWithItsContext(t *testing.T) {
	status := func(code int, reason string) apiServer {
		return func(*http.Request) (*http.Response, error) {
			w := httptest.NewRecorder()
			answer(w, code, reason)
			return w.Result(), nil
		}
	}
	for name, tt := range map[string]struct {
		server apiServer
		cause  string
	}{
		"refused": {func(*http.Request) (*http.Response, error) { return nil, syscall.ECONNREFUSED }, "connection refused"},
		"x509":    {func(*http.Request) (*http.Response, error) { return nil, x509.UnknownAuthorityError{} }, "x509: certificate signed by unknown authority"},
		"401":     {status(http.StatusUnauthorized, "Unauthorized"), "Unauthorized"},
		"403":     {status(http.StatusForbidden, "Forbidden"), "it is Forbidden"},
		"503":     {status(http.StatusServiceUnavailable, "ServiceUnavailable"), "it is ServiceUnavailable"},
		"silent": {func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}, "no answer yet"},
	} {
		for _, outage := range []time.Duration{12 * time.Second, 25 * time.Second, time.Minute} {
			t.Run(fmt.Sprint(name, " for ", outage), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					log := make(lines, 1000)
					logged := func() (n int) {
						synctest.Wait()
						for len(log) > 0 {
							switch line := <-log; {
							case strings.Contains(line, "cannot read from the API server") && strings.Contains(line, tt.cause):
								n++
							case !strings.Contains(line, "cannot read ServiceCIDRs"):
								t.Errorf("unexpected line: %s", line)
							}
						}
						return n
					}
					stop := followBy(t, &rest.Config{Host: "http://api", Transport: tt.server}, slog.New(slog.NewTextHandler(log, nil)), handlerOf(func(string) {}))
					time.Sleep(5 * time.Second)
					if n := logged(); n != 1 {
						t.Errorf("%d lines with the cause after 5 s, want 1", n)
					}
					time.Sleep(outage - 5*time.Second)
					if n := logged(); n > int(outage/time.Minute) {
						t.Errorf("%d lines more after %v", n, outage)
					}
					ended := time.Now()
					stop()
					if took := time.Since(ended); took > time.Second {
						t.Errorf("Follow returned %v after the end of its context", took)
					}
					if n := logged(); n != 0 {
						t.Errorf("%d lines about the end", n)
					}
				})
			})
		}
	}
}

// TestSharedLogSinkIsNotInitialized proves with the race detector that Follow does not
// write to the LogSink of its Logger while others log.
func TestSharedLogSinkIsNotInitialized(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(serveLists))
	t.Cleanup(s.Close)
	log := slog.New(logr.ToSlogHandler(textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(io.Discard)))))
	for range 10 {
		seen := make(chan string, 100)
		stop := follow(t, s.URL, log, func(what string) {
			log.Warn("x")
			select {
			case seen <- what:
			default:
			}
		})
		log.Warn("y")
		<-seen
		stop()
	}
}

// TestAllObjectsAreListedOnRequest follows the objects that the selector excludes, too.
func TestAllObjectsAreListedOnRequest(t *testing.T) {
	for _, all := range []bool{false, true} {
		asked := make(chan bool, 100)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/services") || strings.HasSuffix(r.URL.Path, "/endpointslices") {
				select {
				case asked <- strings.Contains(r.URL.RawQuery, "Selector"):
				default:
				}
			}
			serveLists(w, r)
		}))
		t.Cleanup(s.CloseClientConnections)
		h := handlerOf(func(string) {})
		h.All = all
		stop := followBy(t, &rest.Config{Host: s.URL}, slog.New(slog.DiscardHandler), h)
		for range 2 {
			if restricted := <-asked; restricted == all {
				t.Errorf("All is %v, and the request has a selector: %v", all, restricted)
			}
		}
		stop()
	}
}

// TestOldServerIsRead follows an API server that refuses what servers before Kubernetes 1.31 do not
// know: the field selector of Services, lists as streams, and ServiceCIDRs.
func TestOldServerIsRead(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case strings.Contains(q.Get("fieldSelector"), "spec."):
			answer(w, http.StatusBadRequest, "BadRequest")
		case strings.HasSuffix(r.URL.Path, "/servicecidrs"):
			answer(w, http.StatusNotFound, "NotFound")
		case q.Get("sendInitialEvents") == "" && q.Get("watch") != "":
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			<-r.Context().Done() // no event
		default:
			serveLists(w, r)
		}
	}))
	t.Cleanup(s.CloseClientConnections)
	log := make(lines, 100)
	synced := make(chan string, 100)
	stop := follow(t, s.URL, slog.New(slog.NewTextHandler(log, nil)), func(what string) { synced <- what })
	want := map[string]bool{"synced services": true, "synced endpointslices": true, "synced nodes": true}
	for len(want) != 0 {
		select {
		case what := <-synced:
			delete(want, what)
		case <-time.After(time.Minute):
			t.Fatalf("missing: %v", want)
		}
	}
	stop()
	close(log)
	var text strings.Builder
	for line := range log {
		text.WriteString(line)
	}
	if got := text.String(); strings.Count(got, "does not know a field selector") != 1 || strings.Contains(got, "cannot read from the API server") {
		t.Errorf("log:\n%s", got)
	}
}
