package core

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	userspace "github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localhost serves NodePorts at loopback addresses in this process, in the families in which
// the mode's kernel rules do not serve them: a packet from a loopback address cannot leave the
// node. It is a follower of the ruleset like the kernel's rules. Connections end with the
// process.
type localhost struct {
	plane  *userspace.Backend
	cursor *ruleset.Cursor
	// failed and rejected count.
	failed   func(tracker.Family)
	rejected func(tracker.Family, v1.Protocol)
	// retry requests a sync after a while, or is stopped.
	retry *time.Timer
	every time.Duration
	// complaints receives the Service ports that cannot be served.
	complaints *complaint.Log
}

// openLocalhost opens the data plane of NodePorts at loopback addresses, if the configuration
// and the mode require it.
func (a *Agent) openLocalhost(_ context.Context, p *part) error {
	families := a.Config.LoopbackFamilies(a.families)
	if len(families) == 0 || a.options.Foreign {
		return nil
	}
	log := a.options.Log
	l := &localhost{
		complaints: complaint.NewLog(log), every: max(a.Config.SyncPeriod, time.Second),
		retry: time.AfterFunc(time.Hour, func() { a.runner.Trigger() }),
	}
	l.retry.Stop()
	var own loopbackAddresses
	for _, f := range families {
		own = append(own, config.Loopback(f))
	}
	l.plane = userspace.New(userspace.Config{
		Addresses: own,
		Serves: func(f *ruleset.Frontend, p v1.Protocol, at netip.AddrPort) bool {
			return f.Kind == ruleset.KindNodePort && at.Addr().IsLoopback() && p != v1.ProtocolSCTP
		},
		Dial: a.options.dialTo, Sockets: a.limits, MaxConnections: a.limits.Connections, MaxSessions: a.limits.Sessions,
		Refused: func(p v1.Protocol, at netip.AddrPort) { l.rejected(tracker.FamilyOf(at.Addr()), p) },
		Log:     log,
	})
	l.failed, l.rejected = a.metrics.WatchLocalhostNodePorts(families, l.plane.Sockets)
	l.cursor = a.Engine.Attach("localhost", ruleset.BackendFunc(l.apply))
	a.localhost, p.close = l, closing(l.close)
	return nil
}

// close resets all connections.
func (l *localhost) close() {
	l.retry.Stop()
	l.plane.Close()
}

// apply applies a delta. It counts and logs the Service ports that failed.
func (l *localhost) apply(ctx context.Context, d *ruleset.Delta) error {
	err := l.plane.Apply(ctx, d)
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		for _, k := range slices.SortedFunc(maps.Keys(p.Failed), tracker.Key.Compare) {
			l.failed(k.Family)
			l.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "cannot serve NodePorts at a loopback address, will retry", "error", p.Failed[k])
		}
	}
	return err
}

// sync opens and closes sockets. If some of them cannot be opened, usually because another
// process uses the port, sync requests another sync after a while and returns nil: the rules
// are in effect.
func (l *localhost) sync(ctx context.Context) error {
	err := l.cursor.Sync(ctx)
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		l.retry.Reset(l.every)
		return nil
	}
	return err
}

// loopbackAddresses implements [userspace.Addresses] for loopback addresses, which every node
// has.
type loopbackAddresses []netip.Addr

func (l loopbackAddresses) Own() ([]netip.Addr, error)  { return l, nil }
func (l loopbackAddresses) Hold(netip.Addr) error       { return nil }
func (l loopbackAddresses) Release(netip.Addr) error    { return nil }
func (l loopbackAddresses) Held() ([]netip.Addr, error) { return nil, nil }
