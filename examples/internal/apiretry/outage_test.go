package apiretry

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2/textlogger"

	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// followAll follows all kinds of objects of the Node n until ctx ends, and calls seen for each object and each list.
func followAll(ctx context.Context, c *kubeapi.Client, log *slog.Logger, contact, seen func(what string)) {
	g := NewGroup(ctx, log)
	g.Contact = contact
	_, field := tracker.Selector{}.ServiceListOptions()
	followOne(g, c.Core, Source[*v1.Service]{Resource: "services", Field: field}, seen)
	followOne(g, c.Discovery, Source[*discovery.EndpointSlice]{Resource: "endpointslices"}, seen)
	followOne(g, c.Core, Source[*v1.Node]{Resource: "nodes", Name: "n"}, seen)
	followOne(g, c.Networking, Source[*networking.ServiceCIDR]{Resource: "servicecidrs", Absent: func() {}}, seen)
	_ = g.Wait()
}

func followOne[T metav1.Object](g *Group, client rest.Interface, s Source[T], seen func(what string)) {
	s.Requests = func() (*cache.ListWatch, any) { return Requests(client, s.Resource, ""), client }
	s.Set = func(o T) { seen("set " + s.Resource + " " + o.GetName()) }
	s.Gone = func(n types.NamespacedName) { seen("gone " + s.Resource + " " + n.Name) }
	s.Synced = func() { seen("synced " + s.Resource) }
	Follow(g, s)
}

// startFollowing calls followAll with a client configuration until the test calls stop, which returns after followAll.
func startFollowing(t *testing.T, config *rest.Config, log *slog.Logger, seen func(string)) (stop func()) {
	t.Helper()
	config.QPS, config.Burst = 1e6, 1e6
	c := must.Get(kubeapi.NewClient(config))(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { followAll(ctx, c, log, nil, seen) })
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
					stop := startFollowing(t, &rest.Config{Host: "http://api", Transport: tt.server}, slog.New(slog.NewTextHandler(log, nil)), func(string) {})
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
		stop := startFollowing(t, &rest.Config{Host: s.URL}, log, func(what string) {
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
	stop := startFollowing(t, &rest.Config{Host: s.URL}, slog.New(slog.NewTextHandler(log, nil)), func(what string) { synced <- what })
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

// TestOtherNodesAreIgnored watches an API server that has events of another Node, too.
func TestOtherNodesAreIgnored(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/nodes") || r.URL.Query().Get("watch") == "" || r.URL.Query().Get("sendInitialEvents") != "" {
			serveLists(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		for i, e := range []string{"ADDED other", "DELETED other", "DELETED a", "ADDED n", "DELETED n"} {
			typ, name, _ := strings.Cut(e, " ")
			fmt.Fprintf(w, `{"type":%q,"object":{"kind":"Node","apiVersion":"v1","metadata":{"name":%q,"resourceVersion":"%d"}}}`+"\n", typ, name, i+2)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(s.CloseClientConnections)
	c := must.Get(kubeapi.NewClient(&rest.Config{Host: s.URL}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	var got []string
	followAll(ctx, c, slog.New(slog.DiscardHandler), nil, func(what string) {
		if strings.Contains(what, "set nodes") || strings.Contains(what, "gone nodes") {
			got = append(got, what)
		}
		if what == "gone nodes n" {
			cancel()
		}
	})
	if want := []string{"set nodes n", "gone nodes n"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
