package health

import (
	"container/list"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// maxConns is the maximum number of open connections of a server of this package. One
// that waits for a request takes about 20 kB and a file descriptor.
const maxConns = 512

// NewServer returns a server with handler h that clients cannot exhaust. It is meant for
// health checks and metrics:
//
//   - A client has 10 seconds to send a request, a minute to read the answer, and a
//     minute between two requests.
//   - Headers have at most 16 kB.
//   - There are at most 512 connections. For a new one beyond that the server
//     closes the one that has waited longest for a request. If all have sent a part of a
//     request, it closes the one that began first. So a client that opens many
//     connections does not keep others out.
//
// The caller may change the fields of the server, except ConnState. The handlers of
// net/http/pprof extend the time to write by themselves. Log receives what [http.Server]
// logs, at debug level. Nil discards it.
func NewServer(h http.Handler, log *slog.Logger) *http.Server {
	return newServer(h, newConns(maxConns), log)
}

func newServer(h http.Handler, c *conns, log *slog.Logger) *http.Server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      time.Minute,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnState:         c.changed,
	}
}

// conns bounds the number of open connections of one or more servers.
type conns struct {
	max int

	mu sync.Mutex
	// waiting holds the connections that wait for a request, and busy the others, the
	// longest in that state first. at has all of them.
	waiting, busy list.List
	at            map[net.Conn]place
}

// place is an element of a list.
type place struct {
	*list.List
	*list.Element
}

func newConns(limit int) *conns {
	return &conns{max: limit, at: map[net.Conn]place{}}
}

// changed is an [http.Server].ConnState.
func (c *conns) changed(conn net.Conn, s http.ConnState) {
	if victim := c.record(conn, s); victim != nil {
		victim.Close()
	}
}

// record records a state of a connection. It returns the connection to close, or nil.
func (c *conns) record(conn net.Conn, s http.ConnState) (victim net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known := c.remove(conn); !known && s != http.StateNew {
		// Its goroutine reports a state that it entered before the connection was closed. If
		// that counted, another connection would be closed for it.
		return nil
	}
	switch s {
	case http.StateNew, http.StateIdle:
		c.add(&c.waiting, conn)
	case http.StateActive:
		c.add(&c.busy, conn)
	}
	if len(c.at) <= c.max {
		return nil
	}
	first := c.waiting.Front()
	if first == nil || first.Value == conn {
		first = c.busy.Front()
	}
	if first == nil {
		return nil // only if max is 0
	}
	victim = first.Value.(net.Conn)
	c.remove(victim)
	return victim
}

func (c *conns) add(to *list.List, conn net.Conn) {
	c.at[conn] = place{to, to.PushBack(conn)}
}

// remove removes conn from the lists, and reports whether it was in one.
func (c *conns) remove(conn net.Conn) bool {
	p, ok := c.at[conn]
	if ok {
		p.Remove(p.Element)
		delete(c.at, conn)
	}
	return ok
}
