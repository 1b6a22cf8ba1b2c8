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

// Options are what an Agent gets from its program. The options of package agent describe most fields.
// Config, Modes and Log are required.
type Options struct {
	Config *config.Config
	// Modes are the data planes that the agent finds the rules of. One of them has Config's mode.
	Modes []modes.Mode
	// Foreign reports that the only mode is a data plane of the program's own. The agent then neither
	// looks for rules of other proxies nor touches connection tracking.
	Foreign bool
	// Client is the API server. If it is nil, Config names it, unless there is a Source or Config has
	// manifests.
	Client *kubeapi.Client
	Source objects.Source
	// NetNS is the network namespace to serve. Nil is that of the thread that calls New, and then the
	// servers listen in that of the process.
	NetNS              *os.File
	Log                *slog.Logger
	Lines              io.Writer
	Events             tracker.EventSink
	Component, Version string
	Registerer         prometheus.Registerer
	Labels             prometheus.Labels
	Gatherer           prometheus.Gatherer
	Serve, Tune        bool
	Listen             func(ctx context.Context, network, address string) (net.Listener, error)
	Debug              http.Handler
	Files              uint64
	SocketLB           SocketLB
	Reload             func()
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

// dialTo is Dial for a data plane in this process.
func (o *Options) dialTo(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	return o.Dial(ctx, network, to.String())
}
