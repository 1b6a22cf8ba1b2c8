package core

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// The reasons of the agent's own Events, as kube-proxy has them.
const (
	ReasonStarting           = "Starting"
	reasonHealthzFailed      = "FailedToStartProxierHealthcheck"
	reasonMetricsFailed      = "FailedToStartMetricServer"
	reasonServiceCheckFailed = "FailedToStartServiceHealthcheck"
	reasonIPVSDeprecation    = "IPVSDeprecation"
	reasonIdleKubeProxy      = "IdleKubeProxy"
	reasonConfigInvalid      = "InvalidConfiguration"
	reasonServiceCIDROverlap = "ServiceCIDROverlap"
)

// observers report what the agent does, by metrics, health checks, Events, and a line on
// standard output for each change that is in effect. The agent works without them.
type observers struct {
	metrics  *metrics.Set
	Proxy    *health.Proxy
	ports    *health.NodePorts
	events   tracker.EventSink // nil without an API server
	nodeName string
	// limits is the budget of open files.
	limits *modes.Limits

	// out receives the lines about changes that are in effect, unless entries is not nil.
	out     io.Writer
	entries *slog.Logger
	// manifests reports that the source calls handedIn for each change.
	manifests bool
	// handed is when the oldest change was handed in that no sync has begun with, or nil.
	handed atomic.Pointer[time.Time]
	// due is set if report must print a line for the objects received at receivedAt.
	due        bool
	receivedAt time.Time
	// changed is the number of Service ports that the last sync changed, and synced its outcome.
	changed int
	synced  ruleset.SyncInfo
	// everyLine is set if each sync of changes from an API server has a line. Otherwise lines
	// and, for syncs with failed Services, failures bound their rate.
	everyLine       bool
	lines, failures complaint.Bucket
	line            syncLine
}

func newObservers(opts *Options, families []tracker.Family) (_ *observers, err error) {
	cfg := opts.Config
	o := &observers{
		limits:    modes.LimitsFor(cmp.Or(opts.Files, modes.OpenFiles())),
		metrics:   metrics.NewSet(metrics.Config{Mode: cfg.Mode, Families: families}),
		nodeName:  cfg.NodeName,
		out:       opts.Lines,
		manifests: cfg.Manifests != "",
		everyLine: cfg.LogEverySync,
		lines:     complaint.Bucket{Burst: 1, Every: time.Minute},
		failures:  complaint.Bucket{Burst: 20, Every: 10 * time.Second},
	}
	if opts.Lines == nil {
		o.entries = opts.Log
	}
	o.Proxy, err = health.NewProxy(health.ProxyConfig{Timeout: 2 * cfg.SyncPeriod, Families: families, Answered: o.metrics.Answered})
	if err != nil {
		return nil, err
	}
	o.ports = health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{ProxyHealthy: o.Proxy.Healthy}),
		Families: families,
		Listen:   listenWithin(o.limits, opts.listen), Connections: o.limits.Requests,
		Failed: o.serviceCheckFailed,
		Log:    opts.Log,
	})
	return o, nil
}

// queued is the Queued function of the [runner.Hooks].
func (o *observers) queued(at time.Time) {
	o.Proxy.Queued()
	o.metrics.Queued(at)
}

// onSync is the function for [ruleset.Cursor.OnSync].
func (o *observers) onSync(i ruleset.SyncInfo) {
	o.synced = i
	o.metrics.Synced(i)
}

// begin is called before a sync.
func (o *observers) begin() {
	o.changed = 0
	o.Proxy.Started()
	if t := o.handed.Swap(nil); t != nil {
		o.due, o.receivedAt = true, *t
	} else if !o.due {
		o.receivedAt = time.Now()
	}
}

// handedIn is called when a source has handed in the objects of one change.
func (o *observers) handedIn() {
	now := time.Now()
	o.handed.CompareAndSwap(nil, &now)
}

// appliedDelta is called after each Apply. A sync may need several.
func (o *observers) appliedDelta(d *ruleset.Delta, err error) {
	o.metrics.Applied(d, err)
	if errors.Is(err, ruleset.ErrNeedFull) {
		return // the full delta that follows has these changes again
	}
	for i := range d.Changes {
		if c := &d.Changes[i]; !d.Full || c.Old != c.New { // a full delta has unchanged Services, too
			o.changed++
		}
	}
}

// report writes the line about a change that is in effect: a change of the manifests or,
// with another source, any change of the rules.
func (o *observers) report(failed int) {
	if !o.manifests {
		o.due = o.synced.Applied
	}
	// A sync may take objects from the source before the source has said that they belong to the
	// next line.
	l := &o.line
	l.changed += o.changed
	l.took = max(l.took, o.synced.Took)
	if !o.due {
		return
	}
	o.due = false
	l.syncs++
	l.waited = max(l.waited, o.synced.Start.Sub(o.receivedAt))
	// With manifests, a test or a person waits for each line.
	if !o.manifests && !o.everyLine {
		bucket := &o.lines
		if failed != 0 {
			bucket = &o.failures
		}
		if _, ok := bucket.Take(time.Now()); !ok {
			return
		}
	}
	fields := []any{"services", o.synced.Services, "endpoints", o.synced.Endpoints, "changed", l.changed, "took", l.took.String(), "waited", l.waited.String()}
	if l.syncs != 1 {
		fields = append(fields, "syncs", l.syncs)
	}
	if failed != 0 {
		fields = append(fields, "failed", failed)
	}
	*l = syncLine{}
	if o.entries != nil {
		o.entries.Info("synced", fields...)
		return
	}
	text := "synced"
	for i := 0; i < len(fields); i += 2 {
		text += fmt.Sprintf(" %v=%v", fields[i], fields[i+1])
	}
	fmt.Fprintln(o.out, text)
}

// syncLine collects the syncs since the last line: their number, the Service ports that they
// changed, and the longest times.
type syncLine struct {
	syncs, changed int
	took, waited   time.Duration
}

func (o *observers) nodeEvent(warning bool, reason, message string) {
	if o.events != nil {
		// The UID is the Node's name, as in Events of kube-proxy.
		o.events.Event(v1.ObjectReference{Kind: "Node", Name: o.nodeName, UID: types.UID(o.nodeName)}, warning, reason, message)
	}
}

func (o *observers) serviceCheckFailed(service types.NamespacedName, port uint16, err error) {
	if o.events != nil {
		o.events.Event(v1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: service.Namespace, Name: service.Name, UID: types.UID(service.String())},
			true, reasonServiceCheckFailed, fmt.Sprintf("node %s cannot answer health checks at port %d: %v", o.nodeName, port, err))
	}
}
