package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/metrics"
	userspace "github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localhost serves NodePorts at loopback addresses in this process, in the families in which
// the mode's kernel rules do not serve them: a packet from a loopback address cannot leave the
// node. It is a follower of the ruleset like the kernel's rules. Connections end with the
// process.
type localhost struct {
	plane   *userspace.Backend
	cursor  *ruleset.Cursor
	metrics *metrics.LoopbackMetrics
	// retry requests a sync after a while, or is stopped.
	retry *time.Timer
	every time.Duration
	log   *slog.Logger
	// failing holds the Service ports whose failure was logged.
	failing map[tracker.Key]bool
}

// openLocalhost opens the data plane of NodePorts at loopback addresses, if the configuration
// and the mode require it.
func (a *agent) openLocalhost(log *slog.Logger) error {
	families := a.cfg.LoopbackFamilies(a.families)
	if len(families) == 0 {
		return nil
	}
	l := &localhost{
		log: log, every: max(a.cfg.SyncPeriod, time.Second), failing: map[tracker.Key]bool{},
		retry: time.AfterFunc(time.Hour, func() { a.runner.Trigger() }),
	}
	l.retry.Stop()
	var own loopbackAddresses
	for _, f := range families {
		own = append(own, loopbackOf(f))
	}
	limits := limitsFor(openFiles())
	var err error
	l.plane, err = userspace.New(userspace.Config{
		Addresses: own,
		Serves: func(f *ruleset.Frontend, p v1.Protocol, at netip.AddrPort) bool {
			return f.Kind == ruleset.NodePort && at.Addr().IsLoopback() && p != v1.ProtocolSCTP
		},
		MaxSockets: limits.sockets, MaxConnections: limits.connections, MaxServiceConnections: limits.connections / 4, MaxSessions: limits.sessions,
		Refused: func(p v1.Protocol, at netip.AddrPort) { l.metrics.Rejected(tracker.FamilyOf(at.Addr()), p) },
		Log:     log,
	})
	if err != nil {
		return err
	}
	a.closers = append(a.closers, l.close)
	l.metrics = a.metrics.WatchLocalhostNodePorts(families, l.plane.Sockets)
	l.cursor = a.engine.Attach("localhost", ruleset.BackendFunc(l.apply))
	a.localhost = l
	return nil
}

// close resets all connections.
func (l *localhost) close() {
	l.retry.Stop()
	now, cancel := context.WithCancel(context.Background())
	cancel()
	_ = l.plane.Shutdown(now) // returns now's error if there were connections
}

// apply applies a delta. It counts the Service ports that failed, and logs those that did not
// fail before.
func (l *localhost) apply(ctx context.Context, d *ruleset.Delta) error {
	err := l.plane.Apply(ctx, d)
	failed := map[tracker.Key]error{}
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		failed = p.Failed
	}
	for i := range d.Changes {
		if k := d.Changes[i].Key; failed[k] == nil {
			delete(l.failing, k)
		}
	}
	added := 0
	var example tracker.Key
	for k := range failed {
		l.metrics.Failed(k.Family)
		if !l.failing[k] {
			l.failing[k] = true
			if added++; added == 1 || k.Compare(example) < 0 {
				example = k
			}
		}
	}
	if added != 0 {
		l.log.Warn("cannot serve NodePorts at a loopback address, will retry", "servicePorts", added, "first", example, "error", failed[example])
	}
	return err
}

// sync opens and closes sockets. If some of them cannot be opened, usually because another
// process uses the port, sync requests another sync after a while and returns nil: the rules
// are in effect.
func (l *localhost) sync(ctx context.Context) error {
	err := ignoreNotSynced(l.cursor.Sync(ctx))
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		l.retry.Reset(l.every)
		return nil
	}
	return err
}

func loopbackOf(f tracker.Family) netip.Addr {
	if f == tracker.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// loopbackAddresses implements [userspace.Addresses] for loopback addresses, which every node
// has.
type loopbackAddresses []netip.Addr

func (l loopbackAddresses) Own() ([]netip.Addr, error)  { return l, nil }
func (l loopbackAddresses) Hold(netip.Addr) error       { return nil }
func (l loopbackAddresses) Release(netip.Addr) error    { return nil }
func (l loopbackAddresses) Held() ([]netip.Addr, error) { return nil, nil }

// limits are what a data plane in this process may use.
type limits struct{ sockets, connections, sessions int }

// limitsFor returns the limits for a number of files that the process may open. Half of the
// files are for listening sockets, a quarter for TCP connections with up to six each, and an
// eighth for UDP sessions. The rest is for the agent itself.
func limitsFor(files uint64) limits {
	n := int(min(files, 1<<20))
	return limits{sockets: max(n/2, 1), connections: min(max(n/24, 4), 20000), sessions: min(max(n/8, 1), 5000)}
}

// openFiles returns the number of files that the process may open. The Go runtime raises it to
// the hard limit.
func openFiles() uint64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return r.Cur
}
