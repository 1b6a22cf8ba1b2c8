package core

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/tracker"
)

// Options are what an Agent gets from its program. Config, Modes and Log are required.
type Options struct {
	Config *config.Config
	// Modes are the data planes that the agent finds the rules of. One of them has Config's mode.
	Modes []modes.Mode
	// Foreign reports that the only mode is a data plane of the program's own. The agent then neither
	// looks for rules of other proxies nor touches connection tracking.
	Foreign bool
	// Client is the API server. If it is nil, Config names it, unless there is a Source or Config has
	// manifests. Source, if not nil, has the objects.
	Client *kubeapi.Client
	Source objects.Source
	// NetNS is the network namespace to serve. Nil is that of the thread that calls New, and then the
	// servers listen in that of the process.
	NetNS *os.File
	Log   *slog.Logger
	// Lines receives the lines about changes that are in effect. If it is nil, they are entries of Log.
	Lines io.Writer
	// Events, if not nil, replaces the Events that Client writes.
	Events tracker.EventSink
	// Component names the agent in Events and pages, and Version is its version.
	Component, Version string
	// Registerer, if not nil, gets the metrics, with Labels. Gatherer, if not nil, is served with them.
	Registerer prometheus.Registerer
	Labels     prometheus.Labels
	Gatherer   prometheus.Gatherer
	// Serve makes the agent listen at Config's addresses.
	Serve bool
	// Listen opens each listening socket. Nil means [net.ListenConfig.Listen].
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	// Debug, if not nil, is served at /debug/ beside the metrics.
	Debug http.Handler
	// Files is how many files the agent may open. 0 means as many as the process may.
	Files uint64
	// Tune makes Run set the kernel's parameters of connection tracking.
	Tune bool
	// SocketLB is required by --socket-lb.
	SocketLB SocketLB
	// Reload, if not nil, is called when the configuration changes by its file. Otherwise Run ends.
	Reload func()
}

// Within calls f in the network namespace of the options.
func (o *Options) Within(f func() error) error {
	if o.NetNS == nil {
		return f()
	}
	return doIn(o.NetNS, f)
}

// listen opens a listening socket in the network namespace.
func (o *Options) listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	open := o.Listen
	if open == nil {
		open = new(net.ListenConfig).Listen
	}
	err = o.Within(func() (err error) {
		l, err = open(ctx, network, address)
		return err
	})
	return l, err
}

// Dial connects a socket in the network namespace.
func (o *Options) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = o.Within(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// dialTo returns the Dial function of a data plane in this process, or nil for the default.
func (o *Options) dialTo() func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if o.NetNS == nil {
		return nil
	}
	return func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		return o.Dial(ctx, network, to.String())
	}
}
