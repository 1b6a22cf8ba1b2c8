package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

var (
	// ErrConfigChanged is the error of [Agent.Run] after the configuration's file changed, unless
	// Options.Reload is set.
	ErrConfigChanged = core.ErrConfigChanged
	// ErrPanic is wrapped by the error of [Agent.Run] after a goroutine of the Agent panicked. The
	// error's text has the stack.
	ErrPanic = core.ErrPanic
)

// Options configures an Agent. Config is required, and NodeName if Config has no name.
type Options struct {
	Config *Config
	// NodeName is the name of the Node object. "" means the name in Config.
	NodeName string
	// Client is the API server: [kubeapi.NewClient] makes one for a rest.Config, and a program with a clientset
	// fills in its fields. It connects in the network namespace that the program chose. The Agent
	// also writes Events with it, and removes the startup taint. If both Client and Source are nil, Config names
	// the API server or the manifests.
	Client *kubeapi.Client
	// Source, if not nil, provides the objects, for example from a cache of the program.
	// If Client is set, too, the Agent writes Events and ignores external IPs that equal the API server's address.
	Source Source
	// Node is this node's object. detectLocalMode NodeCIDR requires it if Source is set.
	Node *v1.Node

	// Backend opens the data plane, in place of Config's mode. If the result is a
	// [dataplane.Backend], the Agent uses all its methods and closes it. Such an Agent touches neither
	// connection tracking nor the rules of other proxies. See [Discard].
	Backend func(ctx context.Context, families []tracker.Family) (ruleset.Backend, error)
	// NetNS is an open file of the network namespace to serve; nil means the calling
	// thread's. The Agent opens all its sockets there, except Client's. This needs
	// CAP_SYS_ADMIN, and up to seven threads.
	NetNS *os.File

	// Log receives messages for the operator. Nil discards them.
	Log *slog.Logger
	// Lines receives a line "synced services=2 …" for changes that are in effect, at most one a minute
	// unless --log-every-sync is given. Nil means that the Agent writes these lines to Log.
	Lines io.Writer
	// Events, if not nil, receives the Events that Client would write.
	Events tracker.EventSink
	// Component names the Agent in Events and pages; "" means nodeproxy. Version is for /statusz and Log.
	Component, Version string

	// Registerer, if not nil, gets the Agent's metrics, with Labels, until Run or Close returns. Labels
	// tell several Agents apart.
	Registerer prometheus.Registerer
	Labels     prometheus.Labels
	// Gatherer, if not nil, returns the process's metrics, which [Agent.Metrics] serves beside the Agent's own.
	Gatherer prometheus.Gatherer

	// Serve makes the Agent listen at the addresses of Config, healthzBindAddress and
	// metricsBindAddress. Otherwise the program mounts [Agent.Healthz] and [Agent.Metrics], or asks
	// [Agent.Health].
	Serve bool
	// Debug, if not nil, is served at /debug/ by [Agent.Metrics], such as profiles of the process.
	Debug http.Handler
	// Listen opens the sockets of the servers and of health-check node ports, on a thread in the network
	// namespace. Nil means [net.ListenConfig.Listen]. See [ListenNowhere].
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	// Files is the number of files that the Agent may open for objects and clients. 0 means as many as the
	// process may open (RLIMIT_NOFILE), which is too many for several Agents.
	Files uint64
	// SocketLB is the data plane of --socket-lb, from package sockets. With the zero value the Agent
	// refuses that flag, and leaves the programs of an earlier run.
	SocketLB SocketLB
	// Tune makes Run set the kernel's connection-tracking parameters, which apply to the
	// whole machine. The data planes of modes iptables and ipvs set the parameters of
	// their network namespace.
	Tune bool
	// Reload, if not nil, is called when the configuration in --config's file has changed and is valid.
	// Nil ends Run with [ErrConfigChanged].
	Reload func()
}

// SocketLB is a data plane in front of the mode's. LB of package sockets returns one.
type SocketLB = core.SocketLB

// Agent is the Service proxy of one node.
type Agent struct{ core *core.Agent }

// New returns an Agent. It checks the configuration, the kernel and the privileges, and opens
// everything that may fail to open, but changes no rule and no parameter. An error wraps [ErrConfig],
// or [dataplane.ErrUnsupported], or is about the API server or a file. The caller must call [Agent.Run] or
// [Agent.Close].
//
// New waits for the Node object with detectLocalMode NodeCIDR, until ctx ends.
func New(ctx context.Context, o Options) (*Agent, error) {
	if o.Config == nil {
		return nil, configError{errors.New("no Config")}
	}
	cfg, err := o.Config.of(o.NodeName)
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Component == "" {
		o.Component = "nodeproxy"
	}
	in := core.Options{
		Config: cfg, Client: o.Client, NetNS: o.NetNS, Log: o.Log, Lines: o.Lines, Events: o.Events, Component: o.Component, Version: o.Version,
		Registerer: o.Registerer, Labels: o.Labels, Gatherer: o.Gatherer, Serve: o.Serve, Debug: o.Debug, Listen: o.Listen,
		Files: o.Files, Tune: o.Tune, Reload: o.Reload, SocketLB: o.SocketLB,
	}
	if o.Source != nil {
		in.Source = &source{follow: o.Source, node: o.Node}
	}
	if o.Backend != nil {
		in.Foreign, in.Modes = true, []modes.Mode{foreign(cfg.Mode, o.Backend)}
	} else {
		in.Modes = modes.All(cfg)
		if err := in.Within(func() error {
			flavor := modes.ChooseFlavor(ctx, cfg)
			cfg.Flavor = flavor.Name
			flavor.Log(o.Log)
			return nil
		}); err != nil {
			return nil, err
		}
	}
	a, err := core.New(ctx, in)
	if err != nil {
		return nil, err
	}
	return &Agent{a}, nil
}

// foreignWatch is the interval of the Watch of a program's own data plane.
const foreignWatch = 10 * time.Second

// foreign returns a mode for a data plane of the program's own.
func foreign(name string, open func(context.Context, []tracker.Family) (ruleset.Backend, error)) modes.Mode {
	return modes.Mode{
		Name: name, Watch: foreignWatch,
		Probe: func(context.Context, modes.Settings) error { return nil },
		Open: func(ctx context.Context, s modes.Settings) (modes.Plane, error) {
			b, err := open(ctx, s.Families)
			if err != nil {
				return modes.Plane{}, err
			}
			if p, ok := b.(dataplane.Backend); ok {
				return modes.Plane{Backend: p}, nil
			}
			return modes.Plane{Backend: plain{b}}, nil
		},
	}
}

// Run keeps the data plane in agreement with the objects until ctx ends, and returns nil then. It
// leaves the rules in place, and nothing else. It returns an error after which only a new Agent can continue,
// such as [ErrConfigChanged], a server that cannot listen under bindAddressHardFail, or [ErrPanic]. Run must be
// called once.
func (a *Agent) Run(ctx context.Context) error { return a.core.Run(ctx) }

// Close releases the resources that New opened, if Run is not called.
func (a *Agent) Close() { a.core.Close() }

// Synced returns a channel that is closed when the rules are in effect for the first time.
func (a *Agent) Synced() <-chan struct{} { return a.core.InEffect() }

// Health returns the answers of /healthz and /livez, for a program with probes of its own.
func (a *Agent) Health() *health.Proxy { return a.core.Health() }

// Healthz serves /healthz, /livez and /readyz.
func (a *Agent) Healthz() http.Handler { return a.core.HealthzHandler() }

// Metrics serves the pages of kube-proxy's metrics server: /metrics, /metrics/slis, /proxyMode, /configz,
// /flagz and /statusz.
func (a *Agent) Metrics() http.Handler { return a.core.MetricsHandler() }

// Explain returns v, the required treatment of a connection's first packet and the rule
// behind it, and found, the kernel's destination. found is nil if the mode has no rules
// in the kernel. If p has no NodeAddresses, Explain uses the node's addresses that the
// agent knows.
func (a *Agent) Explain(ctx context.Context, p ruleset.Packet) (v ruleset.Verdict, found *dataplane.Found, err error) {
	return a.core.Explain(ctx, p)
}
