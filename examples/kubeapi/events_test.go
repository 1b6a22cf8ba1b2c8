package kubeapi

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
)

// apiServer is an API server in this process.
type apiServer func(*http.Request) (*http.Response, error)

func (f apiServer) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// lines is a log that a test reads line by line.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// TestRefusedEventsAreLoggedOnceAMinute writes Events to an API server that refuses them, and to one
// that does not answer.
func TestRefusedEventsAreLoggedOnceAMinute(t *testing.T) {
	for name, tt := range map[string]struct {
		server apiServer
		lines  []string // the reasons in the log
	}{
		"refused": {func(*http.Request) (*http.Response, error) {
			w := httptest.NewRecorder()
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":403,"reason":"Forbidden","message":"it is Forbidden"}`)
			return w.Result(), nil
		}, []string{"First", "Third"}},
		"no answer": {func(*http.Request) (*http.Response, error) { return nil, io.EOF }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked atomic.Int64
				c, err := NewClient(&rest.Config{Host: "http://api", Transport: apiServer(func(r *http.Request) (*http.Response, error) {
					asked.Add(1)
					return tt.server(r)
				})})
				if err != nil {
					t.Fatal(err)
				}
				log := make(lines, 100)
				r := NewRecorder(c.Core, "test", "n1", slog.New(slog.NewTextHandler(log, nil)))
				r.NodeEvent(true, "First", "first")
				time.Sleep(30 * time.Second)
				r.NodeEvent(true, "Second", "second")
				time.Sleep(31 * time.Second)
				r.NodeEvent(true, "Third", "third")
				synctest.Wait()
				if n := asked.Load(); n < 3 { // the attempts to write the first Event, if it had no answer
					t.Errorf("%d requests", n)
				}
				// The recorder reports the end of the broadcaster to its own log, with the whole Event.
				r.Shutdown()
				synctest.Wait()
				if len(log) != len(tt.lines) {
					t.Fatalf("%d lines, want %d", len(log), len(tt.lines))
				}
				for _, reason := range tt.lines {
					if line := <-log; !strings.Contains(line, "it is Forbidden") || !strings.Contains(line, "reason="+reason+" about=n1") {
						t.Errorf("no cause, or not of %s, in %s", reason, line)
					}
				}
			})
		})
	}
}
