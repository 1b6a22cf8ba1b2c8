package health

import (
	"cmp"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/fairshare"
)

// maxConns is the default maximum number of open connections. One that waits for a request takes about 20 kB and a
// file descriptor.
const maxConns = 512

// NewServer returns a server with handler h that clients cannot exhaust, for health checks and metrics:
//
//   - A client has 10 seconds to send a request, a minute to read the answer, and a minute between two requests.
//   - Headers have at most 16 kB.
//   - There are at most 512 connections. For a new one beyond that the server closes one of the client that has most:
//     the one that has waited longest for a request or, if all have sent a part of a request, the one that began
//     first.
//
// The caller may change the fields of the server, except ConnState. Log receives what [http.Server] logs, at debug
// level. Nil discards it.
func NewServer(h http.Handler, log *slog.Logger) *http.Server { return NewServerFor(h, 0, log) }

// NewServerFor is [NewServer] for a maximum number of connections; 0 means 512.
func NewServerFor(h http.Handler, connections int, log *slog.Logger) *http.Server {
	return newServer(h, newConns(connections), types.NamespacedName{}, log)
}

// newServer returns a server whose connections belong to a Service, if any.
func newServer(h http.Handler, c *conns, service types.NamespacedName, log *slog.Logger) *http.Server {
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
		ConnState: func(conn net.Conn, s http.ConnState) {
			if victim := c.record(conn, s, service); victim != nil {
				victim.Close()
			}
		},
	}
}

// conns bounds the number of open connections of one or more servers.
type conns struct {
	mu sync.Mutex
	// open has the connections that wait for a request as idle ones.
	open *fairshare.Table[net.Conn]
}

// newConns returns conns for a maximum number of connections; 0 means maxConns.
func newConns(limit int) *conns {
	return &conns{open: fairshare.New[net.Conn](cmp.Or(limit, maxConns))}
}

// record records a state of a connection to a Service's port. It returns the connection to close, or
// nil.
func (c *conns) record(conn net.Conn, s http.ConnState, service types.NamespacedName) (victim net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s {
	case http.StateNew:
		at, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
		victim, _ = c.open.Add(conn, fairshare.Holder{Namespace: service.Namespace, Service: service.Name, Client: at.Addr()})
	case http.StateIdle, http.StateActive:
		// The table does not have a connection that was closed after it had entered the state.
		c.open.Use(conn, s == http.StateActive)
	default:
		c.open.Remove(conn)
	}
	return victim
}
