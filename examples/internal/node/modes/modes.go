// Package modes has the data planes of nodeproxy: how each is probed, opened, looked up and
// cleaned up.
package modes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Settings determine the configuration of a backend.
type Settings struct {
	*config.Config
	Families []tracker.Family
	// NodeIPs holds the node's addresses, for a mode with NeedsNode.
	NodeIPs []netip.Addr
	// Clients returns the clients that kube-proxy remembers for an endpoint, each with the time
	// since its last connection. It may be nil.
	Clients func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration
	// NetNS is the network namespace, nil for the calling thread's.
	NetNS *os.File
	// Dial opens connections to endpoints, for a mode whose data plane is this process. It may be nil.
	Dial func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error)
	// Limits is required by a mode whose data plane is this process.
	Limits *Limits
	// Rules is called with the number of rules in a table of iptables, and the number that
	// the last sync wrote.
	Rules func(f tracker.Family, table string, total, written int)
	// LoadBalancerFailed is called with "create", "modify" or "delete" after Windows refused the
	// call, with what the load balancer serves and the kind of the error in the words of
	// kube-proxy's metrics. It may be nil.
	LoadBalancerFailed func(call string, f tracker.Family, purpose, reason string)
	// LimitExceeded is called with a limit of Windows that a Service exceeds, after a line in Log.
	// It may be nil.
	LimitExceeded func(k tracker.Key, limit string)
	Log           *slog.Logger
}

// Mode is a data plane as the agent uses it.
type Mode struct {
	Name string
	// Watch is the interval of the data plane's Watch.
	Watch time.Duration
	// TakesOver reports that the data plane's objects have the names of kube-proxy's own
	// objects, so that the first sync replaces kube-proxy's.
	TakesOver bool
	// NeedsNode reports that the data plane needs the node's addresses.
	NeedsNode bool
	// TracksConnections reports that Linux tracks connections to Services. The agent then sets the
	// parameters of connection tracking and deletes stale UDP flows.
	TracksConnections bool
	// Probe returns an error if the families of the settings cannot be served on this node.
	// It changes nothing.
	Probe func(context.Context, Settings) error
	// SetSysctls, if not nil, sets the kernel parameters that otherwise the first sync
	// sets. Neither writes a parameter that already has its value.
	SetSysctls func(context.Context, Settings) error
	// Open opens the data plane.
	Open func(context.Context, Settings) (Plane, error)
	// OnService, if not nil, adds to a Service port what the mode reads from annotations of its own.
	OnService func(*v1.Service, *tracker.ServicePort)
	// Owned reports whether the agent has left rules in this mode.
	Owned func(context.Context, *slog.Logger) (bool, error)
	// Cleanup removes the rules that the agent has left in this mode.
	Cleanup func(context.Context, *slog.Logger) error
	// CleanupKubeProxy removes the rules that kube-proxy has left in this mode.
	CleanupKubeProxy func(context.Context, *slog.Logger) error
	// CleanupFlavor, if not nil, removes the rules that the agent has left in this mode in the other
	// flavor of iptables than that of the settings, and those of kube-proxy if the settings have Adopt.
	CleanupFlavor func(context.Context, Settings) error
	// Retire, if not nil, replaces Cleanup and CleanupKubeProxy when the agent changes to
	// another mode. It waits until the connections that Cleanup would break have ended, for no longer
	// than the limit unless that is 0.
	Retire func(ctx context.Context, m Mode, adopt bool, limit time.Duration, log *slog.Logger) error
	// Lookup reads from the kernel where it sends each packet. If there is no entry for a packet,
	// Found.Where states that. The results have the order of the queries. Lookup is nil if the mode has no
	// rules in the kernel.
	Lookup func(context.Context, []dataplane.Query) ([]dataplane.Found, []error)
}

// Plane is the open data plane of a mode.
type Plane struct {
	dataplane.Backend
	// Counters reads the packet counters of the rules, by the names of kube-proxy's accounting
	// objects. It is nil if there are none.
	Counters func() (map[string]uint64, error)
	// Powerless reports that the process cannot remove the rules of other modes.
	Powerless bool
}

// backend describes a mode by the functions of the package of its data plane. C is the package's
// configuration. Functions may be nil that the mode does not have.
type backend[C any, B dataplane.Backend] struct {
	configure      func(Settings) (C, error)
	probe, sysctls func(context.Context, C) error
	open           func(context.Context, C) (B, error)
	// lookup looks one packet up. If there is no entry, Where is noEntry.
	lookup  func(context.Context, dataplane.Query) (dataplane.Found, error)
	noEntry string
	// left returns the configurations with which the agent, or kube-proxy, may have left rules.
	left  func(*slog.Logger) []C
	owned func(context.Context, C) (bool, error)
	// own removes the agent's rules, and all those of kube-proxy, too.
	own, all func(context.Context, C) error
	// flavor returns the flavor of iptables. ownRules and allRules are like own and all, but remove only rules.
	flavor             func(C) iptables.Flavor
	ownRules, allRules func(context.Context, C) error
}

// mode adds its functions to a mode.
func (b backend[C, B]) mode(m Mode) Mode {
	configured := func(do func(context.Context, C) error) func(context.Context, Settings) error {
		return func(ctx context.Context, s Settings) error {
			c, err := b.configure(s)
			if err != nil {
				return err
			}
			return do(ctx, c)
		}
	}
	m.Probe = configured(b.probe)
	m.Open = func(ctx context.Context, s Settings) (p Plane, err error) {
		return p, configured(func(ctx context.Context, c C) error {
			opened, err := b.open(ctx, c)
			if err != nil {
				return err // opened is a nil pointer, and as a dataplane.Backend would not be nil
			}
			p.Backend = opened
			if c, ok := any(opened).(interface {
				Counters() (map[string]uint64, error)
			}); ok {
				p.Counters = c.Counters
			}
			return nil
		})(ctx, s)
	}
	if b.sysctls != nil {
		m.SetSysctls = configured(b.sysctls)
	}
	if b.lookup != nil {
		m.Lookup = func(ctx context.Context, queries []dataplane.Query) (found []dataplane.Found, errs []error) {
			for _, q := range queries {
				f, err := b.lookup(ctx, q)
				if !f.Entry {
					f.Where = b.noEntry
				}
				found, errs = append(found, f), append(errs, err)
			}
			return found, errs
		}
	}
	if b.left != nil {
		m.Owned = func(ctx context.Context, log *slog.Logger) (any bool, err error) {
			for _, c := range b.left(log) {
				owned, e := b.owned(ctx, c)
				any, err = any || owned, errors.Join(err, Missing(e, log))
			}
			return any, err
		}
		m.Cleanup = func(ctx context.Context, log *slog.Logger) error { return cleanupAll(ctx, b.left(log), b.own, log) }
		m.CleanupKubeProxy = func(ctx context.Context, log *slog.Logger) error {
			return cleanupAll(ctx, b.left(log), b.all, log)
		}
	}
	if b.flavor != nil {
		m.CleanupFlavor = func(ctx context.Context, s Settings) error {
			if s.Flavor == iptables.AnyFlavor {
				return nil // only the programs without a flavor in their names can be used
			}
			remove := b.ownRules
			if s.Adopt {
				remove = b.allRules
			}
			left := slices.DeleteFunc(b.left(s.Log), func(c C) bool { return b.flavor(c) != other(s.Flavor) })
			if err := cleanupAll(ctx, left, remove, s.Log); err != nil {
				return err
			}
			return Missing(m.SetSysctls(ctx, s), s.Log) // the clean-up may have set one back
		}
	}
	return m
}

// ifOwned returns cleanup as a function that does nothing for rules that are not the agent's.
func ifOwned[C any](owned func(context.Context, C) (bool, error), cleanup func(context.Context, C) error) func(context.Context, C) error {
	return func(ctx context.Context, c C) error {
		if ok, err := owned(ctx, c); err != nil || !ok {
			return err
		}
		return cleanup(ctx, c)
	}
}

// cleanupAll calls cleanup for each configuration. It retries once after a failure, because rules of
// one flavor of iptables can refer to sets of the other. To its error it adds the verdict maps of nf_tables that lead
// to chains of kube-proxy, which iptables does not see: the kernel does not delete such chains.
func cleanupAll[C any](ctx context.Context, list []C, cleanup func(context.Context, C) error, log *slog.Logger) (err error) {
	for range 2 {
		err = nil
		for _, c := range list {
			err = errors.Join(err, Missing(cleanup(ctx, c), log))
		}
		if err == nil {
			return nil
		}
	}
	if maps := takeover.MapsToChains(); len(maps) != 0 && strings.Contains(err.Error(), "resource busy") {
		err = fmt.Errorf("%w; chains are in use by %s", err, strings.Join(maps, ", "))
	}
	return err
}

// LookupOne is Lookup for one packet.
func (m Mode) LookupOne(ctx context.Context, q dataplane.Query) (dataplane.Found, error) {
	found, errs := m.Lookup(ctx, []dataplane.Query{q})
	return found[0], errs[0]
}

// Find returns the mode of a name.
func Find(modes []Mode, name string) (Mode, error) {
	i := slices.IndexFunc(modes, func(m Mode) bool { return m.Name == name })
	if i < 0 {
		return Mode{}, fmt.Errorf("this build does not support --proxy-mode %s", name)
	}
	return modes[i], nil
}

// Leftovers removes the rules of every mode, and kube-proxy's rules if adopt is set. It continues after an error.
func Leftovers(ctx context.Context, modes []Mode, adopt bool, log *slog.Logger) (err error) {
	for _, m := range modes {
		if e := m.Cleanup(ctx, log); e != nil {
			err = errors.Join(err, fmt.Errorf("cannot remove the rules of mode %s: %w", m.Name, e))
		}
		if !adopt {
			continue
		}
		if e := m.CleanupKubeProxy(ctx, log); e != nil {
			err = errors.Join(err, fmt.Errorf("cannot remove kube-proxy's rules of mode %s: %w", m.Name, e))
		}
	}
	return err
}

// Missing returns err, or nil if the node lacks a feature or program without which no rules
// can exist.
func Missing(err error, log *slog.Logger) error {
	if errors.Is(err, dataplane.ErrUnsupported) && !errors.Is(err, fs.ErrPermission) {
		log.Debug("skipped looking for rules", "error", err)
		return nil
	}
	return err
}

// Limits is the budget of open files for all that objects and clients cause. It must not be copied.
type Limits struct {
	// Sockets is the most listening sockets: of health-check node ports, and of the data plane in
	// this process, together.
	Sockets int
	// Connections and Sessions are the most TCP connections, with up to six files each, and UDP
	// sessions through the data plane in this process.
	Connections, Sessions int
	// Requests is the most connections to each of the agent's two servers, and to all health-check
	// node ports.
	Requests int

	taken atomic.Int64
}

// LimitsFor returns the limits for a number of files that the process may open. Three eighths, but at
// least 32 and at most 128, are for the agent alone: the kernel's sockets, programs, the API server, its
// files. Of the rest, half is for listening sockets, a quarter for TCP connections, an eighth for UDP
// sessions, and an eighth for requests.
func LimitsFor(files uint64) *Limits {
	n := int(min(files, 1<<20))
	n -= min(max(n*3/8, 32), 128)
	return &Limits{
		Sockets: max(n/2, 1), Connections: min(max(n/24, 1), 20000), Sessions: min(max(n/8, 1), 5000),
		Requests: min(max(n/24, 2), 512),
	}
}

// Take reports whether there is room for another listening socket, and counts it. It implements
// [userspace.Allowance].
func (l *Limits) Take() bool {
	if l.taken.Add(1) > int64(l.Sockets) {
		l.taken.Add(-1)
		return false
	}
	return true
}

// Give counts a listening socket as closed.
func (l *Limits) Give() { l.taken.Add(-1) }

// AddTraffic adds the counters of Services in from to those in to.
func AddTraffic(to, from *dataplane.Traffic) {
	for k, c := range from.Services {
		sum := to.Services[k]
		sum.Add(c)
		to.Services[k] = sum
	}
}
