package kubeapi

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// TestRefusedEventsAreLoggedOnceAMinute writes Events to an API server that refuses them, and to one
// that does not answer.
func TestRefusedEventsAreLoggedOnceAMinute(t *testing.T) {
	for name, tt := range map[string]struct {
		handle func(http.ResponseWriter)
		lines  int
	}{
		"refused":   {func(w http.ResponseWriter) { answer(w, http.StatusForbidden, "Forbidden") }, 1},
		"no answer": {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			asked := make(chan struct{}, 100)
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				asked <- struct{}{}
				tt.handle(w)
			}))
			t.Cleanup(s.Close)
			c, err := NewClient(&rest.Config{Host: s.URL})
			if err != nil {
				t.Fatal(err)
			}
			log := make(lines, 100)
			r := NewRecorder(c, "test", "n1", slog.New(slog.NewTextHandler(log, nil)))
			r.NodeEvent(true, "First", "first")
			r.NodeEvent(true, "Second", "second")
			for range 2 { // the second attempt of the first Event, if it had no answer
				select {
				case <-asked:
				case <-time.After(time.Minute):
					t.Fatal("no request")
				}
			}
			// The recorder reports the end of the broadcaster to its own log, with the whole Event.
			r.Shutdown()
			s.Close() // waits for requests
			if len(log) != tt.lines {
				t.Errorf("%d lines, want %d", len(log), tt.lines)
			}
			for len(log) > 0 {
				if line := <-log; !strings.Contains(line, "it is Forbidden") || !strings.Contains(line, "reason=First about=n1") {
					t.Errorf("no cause in %s", line)
				}
			}
		})
	}
}
