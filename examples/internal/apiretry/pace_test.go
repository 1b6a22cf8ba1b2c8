package apiretry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// pipes is a listener whose connections are pipes, so that the clock of package synctest applies to them.
type pipes struct {
	net.Listener
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case p.conns <- server:
		return client, nil
	case <-p.closed: // net/http does not end a dial with the request
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipes) Close() error {
	close(p.closed)
	return nil
}

// pacedServer is an API server in a bubble of package synctest, which does not stream lists. It serves lists, and
// watches without events, unless answer returns true.
type pacedServer struct {
	answer func(w http.ResponseWriter, r *http.Request, watch bool) bool
	// streams has answer answer watches for lists as streams, too.
	streams bool
	// The requests about Services and about Nodes, and the contacts.
	lists, watches, nodeWatches, contacts atomic.Int64
	// synced is closed with the first list of Services.
	synced chan struct{}
	once   sync.Once
	log    lines
}

func (s *pacedServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	watch, services := r.URL.Query().Get("watch") != "", strings.HasSuffix(r.URL.Path, "/services")
	if watch && !s.streams && r.URL.Query().Get("sendInitialEvents") != "" {
		serveLists(w, r)
		return
	}
	switch {
	case services && watch:
		s.watches.Add(1)
	case services:
		s.lists.Add(1)
	case watch && strings.HasSuffix(r.URL.Path, "/nodes"):
		s.nodeWatches.Add(1)
	}
	switch {
	case s.answer != nil && s.answer(w, r, watch):
	case watch:
		w.Header().Set("Content-Type", "application/json")
		w.(http.Flusher).Flush()
		<-r.Context().Done() // no event
	default:
		serveLists(w, r)
	}
}

// follow follows the server while f runs.
func (s *pacedServer) follow(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		// The handler of errors keeps the time of the last one for the whole process, and sleeps until then: that
		// may be later on the clock of another test.
		utilruntime.HandleErrorWithContext(klog.NewContext(t.Context(), logr.Discard()), io.EOF, "the test begins")
		p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
		server := &http.Server{Handler: s}
		var wg sync.WaitGroup
		wg.Go(func() { server.Serve(p) })
		c := must.Get(kubeapi.NewClient(&rest.Config{Host: "http://api", Dial: p.dial, QPS: -1}))(t)
		ctx, cancel := context.WithCancel(t.Context())
		s.log, s.synced = make(lines, 1000), make(chan struct{})
		wg.Go(func() {
			followAll(ctx, c, slog.New(slog.NewTextHandler(s.log, nil)), func(string) { s.contacts.Add(1) }, func(what string) {
				if what == "synced services" {
					s.once.Do(func() { close(s.synced) })
				}
			})
		})
		f(t)
		cancel()
		c.Close()
		server.Close()
		wg.Wait()
	})
}

// text returns the lines so far.
func (l lines) text() (out string) {
	synctest.Wait()
	for len(l) > 0 {
		out += <-l
	}
	return out
}

// TestServerThatDidNotAnswerIsFollowedSoon follows an API server that accepts all requests for a while and never
// answers those, from the start or later.
func TestServerThatDidNotAnswerIsFollowedSoon(t *testing.T) {
	for _, from := range []time.Duration{0, 30 * time.Second} {
		for _, outage := range []time.Duration{15 * time.Second, 50 * time.Second, 5 * time.Minute} {
			t.Run(fmt.Sprint("after ", from, " for ", outage), func(t *testing.T) {
				var hung atomic.Bool
				hung.Store(from == 0)
				s := &pacedServer{answer: func(w http.ResponseWriter, r *http.Request, watch bool) bool {
					if hung.Load() {
						<-r.Context().Done()
						return true
					}
					if !watch {
						return false
					}
					w.Header().Set("Content-Type", "application/json")
					for w.(http.Flusher).Flush(); !hung.Load() && r.Context().Err() == nil; {
						select {
						case <-r.Context().Done():
						case <-time.After(100 * time.Millisecond):
						}
					}
					return true
				}}
				s.follow(t, func(t *testing.T) {
					time.Sleep(from)
					hung.Store(true)
					time.Sleep(time.Second)
					s.contacts.Store(0)
					s.lists.Store(0)
					s.watches.Store(0)
					time.Sleep(outage)
					if n := s.contacts.Load(); n != 0 {
						t.Errorf("%d contacts during the outage", n)
					}
					if text := s.log.text(); outage > 30*time.Second && !strings.Contains(text, "no answer") {
						t.Errorf("no line about the outage: %s", text)
					}
					hung.Store(false)
					time.Sleep(25 * time.Second)
					synctest.Wait()
					if s.lists.Load() == 0 || s.watches.Load() == 0 || s.contacts.Load() == 0 {
						t.Errorf("not followed 25 s after it answers again: %d lists, %d watches, %d contacts", s.lists.Load(), s.watches.Load(), s.contacts.Load())
					}
				})
			})
		}
	}
}

// TestReturnedServerIsFollowed follows an API server that does not serve for longer than a few pauses. It counts the
// attempts: the pauses must not grow without bound.
func TestReturnedServerIsFollowed(t *testing.T) {
	var up atomic.Bool
	s := &pacedServer{answer: func(w http.ResponseWriter, r *http.Request, _ bool) bool {
		if !up.Load() {
			answer(w, http.StatusServiceUnavailable, "ServiceUnavailable")
		}
		return !up.Load()
	}}
	s.follow(t, func(t *testing.T) {
		time.Sleep(20 * time.Second)
		if n := s.lists.Load() + s.watches.Load(); n < 4 || n > 15 { // 0.8 + 1.6 + 3.2 s at most, then 3 to 6 s
			t.Errorf("%d attempts in 20 s", n)
		}
		up.Store(true)
		start := time.Now()
		<-s.synced
		if took := time.Since(start); took > 6*time.Second {
			t.Errorf("followed %v after the return, want 6 s at most", took)
		}
		time.Sleep(6 * time.Second)
		if text := s.log.text(); strings.Count(text, "cannot read from the API server") != 1 || strings.Count(text, "again") != 1 {
			t.Errorf("log: %s", text)
		}
	})
}

// TestRefusedWatchesArePausedBetween follows an API server that serves lists and refuses each watch as
// invalid. The retrier does not repeat such a request, so the reflectors list and watch again, with pauses as
// long as the retrier's, and log why.
func TestRefusedWatchesArePausedBetween(t *testing.T) {
	s := &pacedServer{answer: func(w http.ResponseWriter, r *http.Request, watch bool) bool {
		serveLists(w, r)
		return true
	}}
	s.follow(t, func(t *testing.T) {
		time.Sleep(20 * time.Second)
		reasons := 0
		for line := range strings.Lines(s.log.text()) {
			if strings.Contains(line, "Failed to watch") && strings.Contains(line, "it is Invalid") && strings.Contains(line, "reflector=services") {
				reasons++
			}
		}
		// The pauses are 0.4 to 0.8 s, 0.8 to 1.6, 1.6 to 3.2, and then 3 to 6.
		if n := int(s.watches.Load()); reasons < 4 || reasons > 8 || n != reasons {
			t.Errorf("%d lines with the reason of %d refusals", reasons, n)
		}
	})
}

// TestSlowServerIsFollowed follows an API server that takes long for each list of all objects.
func TestSlowServerIsFollowed(t *testing.T) {
	s := &pacedServer{answer: func(w http.ResponseWriter, r *http.Request, watch bool) bool {
		if !watch && r.URL.Query().Get("limit") != "1" {
			time.Sleep(55 * time.Second)
		}
		return false
	}}
	s.follow(t, func(t *testing.T) {
		begin := time.Now()
		<-s.synced
		if took := time.Since(begin); took > 80*time.Second {
			t.Errorf("synced after %v", took)
		}
	})
}

// TestSilentWatchIsReplaced watches an API server that sends no event.
func TestSilentWatchIsReplaced(t *testing.T) {
	s := &pacedServer{}
	s.follow(t, func(t *testing.T) {
		time.Sleep(10 * time.Minute)
		if n := s.nodeWatches.Load(); n != 4 {
			t.Errorf("%d watches in 10 minutes, want 4", n)
		}
		if text := s.log.text(); text != "" {
			t.Errorf("log: %s", text)
		}
	})
}

// TestResourceForbiddenForAMomentIsFollowedSoon reads ServiceCIDRs from an API server that forbids them once, as it may
// while it starts: only a resource that was never readable is absent for ten minutes.
func TestResourceForbiddenForAMomentIsFollowedSoon(t *testing.T) {
	var watches atomic.Int64
	s := &pacedServer{answer: func(w http.ResponseWriter, r *http.Request, watch bool) bool {
		if !watch || !strings.HasSuffix(r.URL.Path, "/servicecidrs") {
			return false
		}
		n := watches.Add(1)
		if n == 2 {
			answer(w, http.StatusForbidden, "Forbidden")
		}
		return n <= 2 // the first one ends
	}}
	s.follow(t, func(t *testing.T) {
		time.Sleep(20 * time.Second)
		if n := watches.Load(); n != 3 {
			t.Errorf("%d watches in 20 s, want 3", n)
		}
	})
}

// TestRetryAfterIsBounded receives one answer that asks to come back after two minutes.
func TestRetryAfterIsBounded(t *testing.T) {
	for _, code := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		for _, what := range []string{"list", "watch"} {
			t.Run(fmt.Sprint(code, " to a ", what), func(t *testing.T) {
				var refused atomic.Int64
				s := &pacedServer{answer: func(w http.ResponseWriter, r *http.Request, watch bool) bool {
					if !strings.HasSuffix(r.URL.Path, "/services") || watch != (what == "watch") || refused.Add(1) != 1 {
						return false
					}
					w.Header().Set("Retry-After", "120")
					answer(w, code, "TooManyRequests")
					return true
				}}
				s.follow(t, func(t *testing.T) {
					begin := time.Now()
					watches := map[string]int64{"list": 1, "watch": 2}[what] // with the refused one
					for s.watches.Load() < watches {
						time.Sleep(100 * time.Millisecond)
					}
					if took := time.Since(begin); took > 6*time.Second {
						t.Errorf("watched after %v", took)
					}
					if text := s.log.text(); !strings.Contains(text, "it is TooManyRequests") {
						t.Errorf("log: %s", text)
					}
				})
			})
		}
	}
}

// TestWatchesThatEndAtOnceArePaced follows API servers that end every watch.
func TestWatchesThatEndAtOnceArePaced(t *testing.T) {
	expired := `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old","reason":"Expired","code":410}`
	event := func(typ, object string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"type":%q,"object":%s}`+"\n", typ, object)
		}
	}
	for name, end := range map[string]http.HandlerFunc{
		"410":            func(w http.ResponseWriter, r *http.Request) { answer(w, http.StatusGone, "Expired") },
		"an event 410":   event("ERROR", expired),
		"no event":       func(w http.ResponseWriter, r *http.Request) {},
		"a bookmark":     event("BOOKMARK", `{"kind":"Service","apiVersion":"v1","metadata":{"resourceVersion":"5"}}`),
		"an error event": event("ERROR", strings.ReplaceAll(strings.ReplaceAll(expired, "Expired", "InternalError"), "410", "500")),
	} {
		t.Run(name, func(t *testing.T) {
			s := &pacedServer{streams: true, answer: func(w http.ResponseWriter, r *http.Request, watch bool) bool {
				if watch {
					end(w, r)
				}
				return watch
			}}
			s.follow(t, func(t *testing.T) {
				time.Sleep(2 * time.Minute)
				if n := s.lists.Load() + s.watches.Load(); n < 20 || n > 120 {
					t.Errorf("%d requests about Services in two minutes", n)
				}
				if text := s.log.text(); !strings.Contains(text, "watch") {
					t.Errorf("log: %s", text)
				}
			})
		})
	}
}

// TestConnectionWithoutAnAnswerIsNoContact follows an API server, or a proxy in front of it, that accepts connections and
// closes them. client-go takes that for a watch without events.
func TestConnectionWithoutAnAnswerIsNoContact(t *testing.T) {
	s := &pacedServer{streams: true, answer: func(http.ResponseWriter, *http.Request, bool) bool { panic(http.ErrAbortHandler) }}
	s.follow(t, func(t *testing.T) {
		time.Sleep(time.Minute)
		if n := s.lists.Load() + s.watches.Load(); s.contacts.Load() != 0 || n < 4 || n > 30 {
			t.Errorf("%d contacts in %d attempts", s.contacts.Load(), n)
		}
		if text := s.log.text(); !strings.Contains(text, "the connection ended before the answer") {
			t.Errorf("log: %s", text)
		}
	})
}
