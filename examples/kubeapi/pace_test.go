package kubeapi

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
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

// followPipes follows the API server h in a bubble of package synctest until the test calls stop.
func followPipes(t *testing.T, h http.HandlerFunc, seen func(string), contact func(Source)) (log lines, stop func()) {
	p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	s := &http.Server{Handler: h}
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(p) })
	c := must.Get(NewClient(&rest.Config{Host: "http://api", Dial: p.dial, QPS: -1}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	log = make(lines, 1000)
	handler := handlerOf(seen)
	handler.Contact = contact
	wg.Go(func() { Follow(ctx, c, tracker.Selector{}, "n", handler, slog.New(slog.NewTextHandler(log, nil))) })
	return log, func() {
		cancel()
		c.Close()
		s.Close()
		wg.Wait()
	}
}

// text returns the lines so far.
func (l lines) text() (out string) {
	for len(l) > 0 {
		out += <-l
	}
	return out
}

// isWatch reports whether a request is a watch, and answers one for a list as a stream as servers do that have none.
func isWatch(w http.ResponseWriter, r *http.Request) (watch, answered bool) {
	watch = r.URL.Query().Get("watch") != ""
	if watch && r.URL.Query().Get("sendInitialEvents") != "" {
		serveLists(w, r)
		return true, true
	}
	return watch, false
}

// watchUntil answers a watch without events until one of the two ends.
func watchUntil(w http.ResponseWriter, r *http.Request, end <-chan struct{}) {
	w.Header().Set("Content-Type", "application/json")
	w.(http.Flusher).Flush()
	select {
	case <-end:
	case <-r.Context().Done():
	}
}

// TestServerThatDidNotAnswerIsFollowedSoon follows an API server that accepts all requests for a while and never
// answers those, from the start or later.
func TestServerThatDidNotAnswerIsFollowedSoon(t *testing.T) {
	for _, from := range []time.Duration{0, 30 * time.Second} {
		for _, outage := range []time.Duration{15 * time.Second, 50 * time.Second, 5 * time.Minute} {
			t.Run(fmt.Sprint("after ", from, " for ", outage), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var hung atomic.Bool
					var began atomic.Pointer[chan struct{}]
					next := func() chan struct{} { c := make(chan struct{}); began.Store(&c); return c }
					outageBegins := next()
					hung.Store(from == 0)
					var lists, watches, contacts atomic.Int64
					log, stop := followPipes(t, func(w http.ResponseWriter, r *http.Request) {
						if hung.Load() {
							<-r.Context().Done()
							return
						}
						watch, answered := isWatch(w, r)
						if answered {
							return
						}
						if !watch {
							if strings.HasSuffix(r.URL.Path, "/services") {
								lists.Add(1)
							}
							serveLists(w, r)
							return
						}
						if strings.HasSuffix(r.URL.Path, "/services") {
							watches.Add(1)
						}
						watchUntil(w, r, *began.Load())
					}, func(string) {}, func(Source) { contacts.Add(1) })
					time.Sleep(from)
					hung.Store(true)
					close(outageBegins)
					time.Sleep(time.Second)
					contacts.Store(0)
					watches.Store(0)
					time.Sleep(outage)
					if n := contacts.Load(); n != 0 {
						t.Errorf("%d contacts during the outage", n)
					}
					if text := log.text(); outage > 30*time.Second && !strings.Contains(text, "no answer") {
						t.Errorf("no line about the outage: %s", text)
					}
					next()
					hung.Store(false)
					time.Sleep(25 * time.Second)
					synctest.Wait()
					if lists.Load() == 0 || watches.Load() == 0 || contacts.Load() == 0 {
						t.Errorf("not followed 25 s after it answers again: %d lists, %d watches, %d contacts", lists.Load(), watches.Load(), contacts.Load())
					}
					stop()
				})
			})
		}
	}
}

// TestSlowServerIsFollowed follows an API server that takes long for each list of all objects.
func TestSlowServerIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		synced := make(chan string, 1000)
		_, stop := followPipes(t, func(w http.ResponseWriter, r *http.Request) {
			watch, answered := isWatch(w, r)
			switch {
			case answered:
			case watch:
				watchUntil(w, r, nil)
			default:
				if r.URL.Query().Get("limit") != "1" {
					time.Sleep(55 * time.Second)
				}
				serveLists(w, r)
			}
		}, func(what string) {
			if what == "synced services" {
				synced <- what
			}
		}, nil)
		begin := time.Now()
		<-synced
		if took := time.Since(begin); took > 80*time.Second {
			t.Errorf("synced after %v", took)
		}
		stop()
	})
}

// TestSilentWatchIsReplaced watches an API server that sends no event.
func TestSilentWatchIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var watches atomic.Int64
		log, stop := followPipes(t, func(w http.ResponseWriter, r *http.Request) {
			watch, answered := isWatch(w, r)
			switch {
			case answered:
			case watch:
				if strings.HasSuffix(r.URL.Path, "/nodes") {
					watches.Add(1)
				}
				watchUntil(w, r, nil)
			default:
				serveLists(w, r)
			}
		}, func(string) {}, nil)
		time.Sleep(10 * time.Minute)
		if n := watches.Load(); n != 4 {
			t.Errorf("%d watches in 10 minutes, want 4", n)
		}
		if text := log.text(); text != "" {
			t.Errorf("log: %s", text)
		}
		stop()
	})
}

// TestRetryAfterIsBounded receives one answer that asks to come back after two minutes.
func TestRetryAfterIsBounded(t *testing.T) {
	for _, code := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		for _, what := range []string{"list", "watch"} {
			t.Run(fmt.Sprint(code, " to a ", what), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var refused atomic.Int64
					synced, watched := make(chan string, 1000), make(chan string, 1000)
					log, stop := followPipes(t, func(w http.ResponseWriter, r *http.Request) {
						watch, answered := isWatch(w, r)
						if answered {
							return
						}
						if services := strings.HasSuffix(r.URL.Path, "/services"); services && watch == (what == "watch") && refused.Add(1) == 1 {
							w.Header().Set("Retry-After", "120")
							answer(w, code, "TooManyRequests")
							return
						} else if services && watch {
							watched <- ""
						}
						if watch {
							watchUntil(w, r, nil)
						} else {
							serveLists(w, r)
						}
					}, func(what string) { synced <- what }, nil)
					begin := time.Now()
					<-watched
					if took := time.Since(begin); took > 6*time.Second {
						t.Errorf("watched after %v", took)
					}
					if text := log.text(); !strings.Contains(text, "it is TooManyRequests") {
						t.Errorf("log: %s", text)
					}
					stop()
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
			synctest.Test(t, func(t *testing.T) {
				var requests atomic.Int64
				log, stop := followPipes(t, func(w http.ResponseWriter, r *http.Request) {
					watch := r.URL.Query().Get("watch") != ""
					if strings.HasSuffix(r.URL.Path, "/services") {
						requests.Add(1)
					}
					if watch {
						end(w, r)
					} else {
						serveLists(w, r)
					}
				}, func(string) {}, nil)
				time.Sleep(2 * time.Minute)
				if n := requests.Load(); n < 20 || n > 120 {
					t.Errorf("%d requests about Services in two minutes", n)
				}
				if text := log.text(); !strings.Contains(text, "watch") {
					t.Errorf("log: %s", text)
				}
				stop()
			})
		})
	}
}

// TestConnectionWithoutAnAnswerIsNoContact follows an API server, or a proxy in front of it, that accepts connections and
// closes them. client-go takes that for a watch without events.
func TestConnectionWithoutAnAnswerIsNoContact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var attempts, contacts atomic.Int64
		log, stop := followPipes(t, func(http.ResponseWriter, *http.Request) {
			attempts.Add(1)
			panic(http.ErrAbortHandler)
		}, func(string) {}, func(Source) { contacts.Add(1) })
		time.Sleep(time.Minute)
		if n := attempts.Load(); contacts.Load() != 0 || n < 20 || n > 120 {
			t.Errorf("%d contacts in %d attempts", contacts.Load(), n)
		}
		if text := log.text(); !strings.Contains(text, "the connection ended before the answer") {
			t.Errorf("log: %s", text)
		}
		stop()
	})
}
