package health

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// ProxyConfig configures a [Proxy].
type ProxyConfig struct {
	// Timeout is the time within which an update must come into effect. It is
	// required. kube-proxy uses twice its sync period.
	Timeout time.Duration
	// Families lists the address families to report. Nil means both.
	Families []tracker.Family
	// Answered, if not nil, is called with the status code after each response of
	// [Proxy.Healthz] and [Proxy.Livez]. Calls may be concurrent.
	Answered func(check Check, code int)
}

// Check is one of the two health checks of a [Proxy].
type Check string

// The checks, named like their paths.
const (
	Healthz Check = "healthz"
	Livez   Check = "livez"
)

// Proxy tracks whether updates come into effect in time, and whether the node is eligible for traffic. Its methods
// are safe for concurrent use. [NewProxy] makes one; the zero value must not be used.
type Proxy struct {
	cfg ProxyConfig

	mu sync.Mutex
	// ineligible is why the node is not eligible for load-balancer traffic, or "".
	ineligible string
	families   map[tracker.Family]*progress
}

type progress struct {
	queued  time.Time // the oldest update that no sync has started to apply; zero for none
	syncing time.Time // the oldest update in the current sync
	updated time.Time // the end of the last successful sync; zero for none
	missing bool      // rules are missing in the kernel
}

// NewProxy returns a Proxy whose node is eligible. It becomes healthy when a sync has succeeded
// in each family. The error is about c.
func NewProxy(c ProxyConfig) (*Proxy, error) {
	if c.Timeout <= 0 {
		return nil, fmt.Errorf("health: invalid configuration: Timeout (%v) must be positive", c.Timeout)
	}
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	p := &Proxy{cfg: c, families: map[tracker.Family]*progress{}}
	for _, f := range c.Families {
		if f.Bits() == 0 {
			return nil, fmt.Errorf("health: invalid configuration: unknown family %d", f)
		}
		p.families[f] = &progress{}
	}
	return p, nil
}

// Hooks returns hooks for a [runner.Runner] whose function updates every family. A run whose error leaves the rules
// in effect ([ruleset.InEffect]) counts as a success. After another run that waits for something
// ([runner.IsNotReady]) the updates continue to wait. If families can fail independently, as under
// [github.com/go-proxier/proxier/ruleset/dataplane.ByFamily], call [Proxy.Queued], [Proxy.Started] and [Proxy.Done]
// instead.
func (p *Proxy) Hooks() *runner.Hooks {
	return &runner.Hooks{
		Queued:    func(time.Time) { p.Queued() },
		SyncStart: func(runner.RunInfo) { p.Started() },
		SyncDone: func(i runner.RunInfo) {
			p.Done(ruleset.InEffect(i.Err))
		},
	}
}

func (p *Proxy) each(families []tracker.Family, f func(*progress)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, s := range p.families {
		if len(families) == 0 || slices.Contains(families, name) {
			f(s)
		}
	}
}

// Queued records that an update is waiting in the given families, or in all if none
// are given.
func (p *Proxy) Queued(families ...tracker.Family) {
	now := time.Now()
	p.each(families, func(s *progress) {
		if s.queued.IsZero() {
			s.queued = now
		}
	})
}

// Started records that a sync of the queued updates has started, in the given families or in all if none are given.
func (p *Proxy) Started(families ...tracker.Family) {
	now := time.Now()
	p.each(families, func(s *progress) {
		// If the previous sync did not call Done, its oldest update still counts.
		for _, t := range []time.Time{s.queued, now} {
			if s.syncing.IsZero() {
				s.syncing = t
			}
		}
		s.queued = time.Time{}
	})
}

// Done records the end of the sync that was Started last, in the given families or in
// all if none are given. After a failure its updates continue to wait.
func (p *Proxy) Done(ok bool, families ...tracker.Family) {
	now := time.Now()
	p.each(families, func(s *progress) {
		if ok {
			s.updated, s.missing = now, false
		} else if !s.syncing.IsZero() {
			s.queued = s.syncing
		}
		s.syncing = time.Time{}
	})
}

// Missing records that the kernel lacks rules in the given families, or in all if none are given.
// Until the next success /healthz fails, but /livez does not.
func (p *Proxy) Missing(families ...tracker.Family) {
	p.each(families, func(s *progress) { s.missing = true })
}

// SetIneligible records why the node may not get load-balancer traffic, or that it may if the reason is "". /healthz
// returns the reason; see [WhyIneligible].
func (p *Proxy) SetIneligible(reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ineligible = reason
}

// Healthy reports whether a sync has succeeded in each family, and no update has waited too long in any.
func (p *Proxy) Healthy() bool {
	return p.status(Healthz).Healthy
}

// familyStatus is the health of one address family, in kube-proxy's JSON format.
type familyStatus struct {
	// LastUpdated is the time of the last successful sync in the family.
	LastUpdated time.Time `json:"lastUpdated"`
	// Healthy reports whether no update of the family has waited for the timeout or
	// longer.
	Healthy bool `json:"healthy"`
}

// status is the body of a response, in kube-proxy's JSON format, and a reason.
type status struct {
	// LastUpdated is CurrentTime if the check succeeds. Otherwise it is the latest LastUpdated in Status, or the zero
	// time.
	LastUpdated time.Time `json:"lastUpdated"`
	// CurrentTime is the time of the check.
	CurrentTime time.Time `json:"currentTime"`
	// NodeEligible reports whether the node may get load-balancer traffic. For /livez
	// it is nil and not part of the JSON.
	NodeEligible *bool `json:"nodeEligible,omitempty"`
	// Healthy reports whether every family in Status is healthy and, for /healthz, Status has
	// all families.
	Healthy bool `json:"healthy"`
	// Reason says why the check fails. It is not part of the JSON if it succeeds.
	Reason string `json:"reason,omitempty"`
	// Status has an entry for each family with a successful sync. If it is empty, it
	// is not part of the JSON.
	Status map[v1.IPFamily]familyStatus `json:"status,omitempty"`
}

func (s status) ok() bool {
	return s.Healthy && (s.NodeEligible == nil || *s.NodeEligible)
}

// status returns the current result of a check. Load balancers must not use a node without rules in a family. But a
// proxy that waits for the API server is alive.
func (p *Proxy) status(c Check) status {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	out := status{CurrentTime: now, Healthy: true, Status: map[v1.IPFamily]familyStatus{}}
	for _, name := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		s := p.families[name]
		if s == nil {
			continue
		}
		if s.updated.IsZero() {
			if c == Healthz {
				out.Healthy = false
				out.Reason = "no sync has succeeded yet"
			}
			continue
		}
		waiting := s.syncing
		if waiting.IsZero() {
			waiting = s.queued
		}
		f := familyStatus{LastUpdated: s.updated, Healthy: waiting.IsZero() || now.Sub(waiting) < p.cfg.Timeout}
		if !f.Healthy {
			out.Healthy = false
			out.Reason = fmt.Sprintf("an update in %v waits for %v", name, now.Sub(waiting).Round(time.Second))
		}
		if c == Healthz && s.missing {
			f.Healthy, out.Healthy = false, false
			out.Reason = fmt.Sprintf("another process deleted rules in %v", name)
		}
		if f.LastUpdated.After(out.LastUpdated) {
			out.LastUpdated = f.LastUpdated
		}
		out.Status[v1.IPFamily(name.String())] = f
	}
	if c == Healthz {
		eligible := p.ineligible == ""
		out.NodeEligible = &eligible
		if !eligible {
			out.Reason = strings.TrimSuffix(p.ineligible+"; "+out.Reason, "; ")
		}
	}
	if out.ok() {
		out.LastUpdated = now
	}
	return out
}

// Healthz returns a handler that reports whether the node should get load-balancer
// traffic: 200 or 503, with kube-proxy's JSON.
func (p *Proxy) Healthz() http.Handler { return p.handler(Healthz) }

// Livez returns a handler that reports whether the proxy works: 200 or 503, with kube-proxy's JSON.
func (p *Proxy) Livez() http.Handler { return p.handler(Livez) }

func (p *Proxy) handler(c Check) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s := p.status(c)
		code := http.StatusOK
		if !s.ok() {
			code = http.StatusServiceUnavailable
		}
		writeJSON(w, code, s)
		if p.cfg.Answered != nil {
			p.cfg.Answered(c, code)
		}
	})
}

func writeJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	// An error means that the client has gone.
	_ = json.NewEncoder(w).Encode(body)
}

// taintToBeDeleted is the taint that the cluster autoscaler sets on a node before it
// removes the node.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// WhyIneligible returns why a node may not get load-balancer traffic, or "" if it may: it is not being deleted, and
// the cluster autoscaler has not marked it for removal (taint ToBeDeletedByClusterAutoscaler; KEP-3836). A nil node
// may not.
func WhyIneligible(n *v1.Node) string {
	switch {
	case n == nil:
		return "there is no Node object"
	case n.DeletionTimestamp != nil:
		return "the Node object is being deleted"
	case slices.ContainsFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == taintToBeDeleted }):
		return "the Node has the taint " + taintToBeDeleted
	}
	return ""
}
