package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// ErrConfig is what errors of [NewProxy] are.
var ErrConfig = errors.New("health: bad configuration")

// ProxyConfig says when a proxy is healthy.
type ProxyConfig struct {
	// Timeout is how long an update may wait until it is in effect; required.
	// kube-proxy's is twice its sync period.
	Timeout time.Duration
	// Families is the address families that are reported. Nil means both.
	Families []tracker.Family
	// Now is the clock. Nil means [time.Now].
	Now func() time.Time
	// Answered, if not nil, is called after each answer of [Proxy.Healthz] and
	// [Proxy.Livez], with the status code. It may be called concurrently.
	Answered func(check Check, code int)
}

// Check is one of the two questions that a [Proxy] answers.
type Check string

// The checks, named as their paths are.
const (
	Healthz Check = "healthz"
	Livez   Check = "livez"
)

// Proxy is the health of a proxy: whether updates come into effect in time, and
// whether the node is eligible for traffic. Its methods are safe for concurrent
// use.
type Proxy struct {
	cfg ProxyConfig

	mu         sync.Mutex
	ineligible bool
	families   map[tracker.Family]*progress
}

// progress is what is known of one family.
type progress struct {
	queued  time.Time // the oldest update that no sync has begun with; zero for none
	syncing time.Time // the oldest update in the sync that is under way
	updated time.Time // the end of the last sync that succeeded; zero for none
}

// NewProxy returns a Proxy that is healthy, of an eligible node. It fails only
// with [ErrConfig].
func NewProxy(c ProxyConfig) (*Proxy, error) {
	if c.Timeout <= 0 {
		return nil, fmt.Errorf("%w: Timeout (%v) must be positive", ErrConfig, c.Timeout)
	}
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	p := &Proxy{cfg: c, families: map[tracker.Family]*progress{}}
	for _, f := range c.Families {
		if f.Bits() == 0 {
			return nil, fmt.Errorf("%w: Families has %v", ErrConfig, f)
		}
		p.families[f] = &progress{}
	}
	return p, nil
}

// Trace returns hooks for a [runner.Runner] whose function brings every family up
// to date. A run that ends in a [*ruleset.PartialError] alone counts as one that
// succeeded: what cannot be done for one Service is no reason to take the node's
// others away. Where families fail apart, as under [ruleset.ByFamily], call
// [Proxy.Queued], [Proxy.Started] and [Proxy.Done] instead.
func (p *Proxy) Trace() *runner.Trace {
	return &runner.Trace{
		Queued:    func(time.Time) { p.Queued() },
		SyncStart: func(runner.Info) { p.Started() },
		SyncDone: func(i runner.Info) {
			p.Done(i.Err == nil || errors.As(i.Err, new(*ruleset.PartialError)))
		},
	}
}

// each calls f for the families given, all if none.
func (p *Proxy) each(families []tracker.Family, f func(*progress)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, s := range p.families {
		if len(families) == 0 || slices.Contains(families, name) {
			f(s)
		}
	}
}

// Queued says that there is something to bring into effect, in the families given
// or all if none.
func (p *Proxy) Queued(families ...tracker.Family) {
	now := p.cfg.Now()
	p.each(families, func(s *progress) {
		if s.queued.IsZero() {
			s.queued = now
		}
	})
}

// Started says that a sync has begun, which takes in what was queued before.
func (p *Proxy) Started(families ...tracker.Family) {
	now := p.cfg.Now()
	p.each(families, func(s *progress) {
		// After a sync that was not Done the oldest still counts.
		for _, t := range []time.Time{s.queued, now} {
			if s.syncing.IsZero() {
				s.syncing = t
			}
		}
		s.queued = time.Time{}
	})
}

// Done says how the sync ended that was Started last. What was to be brought into
// effect by one that failed goes on waiting.
func (p *Proxy) Done(ok bool, families ...tracker.Family) {
	now := p.cfg.Now()
	p.each(families, func(s *progress) {
		if ok {
			s.updated = now
		} else if !s.syncing.IsZero() {
			s.queued = s.syncing
		}
		s.syncing = time.Time{}
	})
}

// SetEligible says whether the node may get load-balancer traffic; see [Eligible].
func (p *Proxy) SetEligible(eligible bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ineligible = !eligible
}

// Healthy reports whether no update has waited too long in any family. It is what
// /livez answers.
func (p *Proxy) Healthy() bool {
	return p.Status(Livez).Healthy
}

// FamilyStatus is the health of one address family, in JSON as kube-proxy has it.
type FamilyStatus struct {
	// LastUpdated is when a sync last succeeded in the family.
	LastUpdated time.Time `json:"lastUpdated"`
	// Healthy reports whether no update of the family has waited for as long as the
	// timeout.
	Healthy bool `json:"healthy"`
}

// Status is the body of an answer, in JSON as kube-proxy has it.
type Status struct {
	// LastUpdated is CurrentTime if the answer is yes. Otherwise it is the latest
	// LastUpdated in Status, or the zero time if Status is empty.
	LastUpdated time.Time `json:"lastUpdated"`
	// CurrentTime is the time of asking.
	CurrentTime time.Time `json:"currentTime"`
	// NodeEligible reports whether the node may get load-balancer traffic. It is nil,
	// and not in the JSON, in an answer of /livez.
	NodeEligible *bool `json:"nodeEligible,omitempty"`
	// Healthy reports whether every family in Status is healthy.
	Healthy bool `json:"healthy"`
	// Status has an entry for each family in which a sync has succeeded. If there is
	// none, it is not in the JSON.
	Status map[v1.IPFamily]FamilyStatus `json:"status,omitempty"`
}

// OK reports whether the answer is yes.
func (s Status) OK() bool {
	return s.Healthy && (s.NodeEligible == nil || *s.NodeEligible)
}

// Status returns what a check is answered with at this moment. A family in which
// no sync has succeeded yet is not looked at, as by kube-proxy: a proxy that
// waits for the API server is alive.
func (p *Proxy) Status(c Check) Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	out := Status{CurrentTime: now, Healthy: true, Status: map[v1.IPFamily]FamilyStatus{}}
	for name, s := range p.families {
		if s.updated.IsZero() {
			continue
		}
		waiting := s.syncing
		if waiting.IsZero() {
			waiting = s.queued
		}
		f := FamilyStatus{LastUpdated: s.updated, Healthy: waiting.IsZero() || now.Sub(waiting) < p.cfg.Timeout}
		out.Healthy = out.Healthy && f.Healthy
		if f.LastUpdated.After(out.LastUpdated) {
			out.LastUpdated = f.LastUpdated
		}
		out.Status[v1.IPFamily(name.String())] = f
	}
	if c == Healthz {
		eligible := !p.ineligible
		out.NodeEligible = &eligible
	}
	if out.OK() {
		out.LastUpdated = now
	}
	return out
}

// Healthz returns a handler that answers whether the node should get load-balancer
// traffic: 200 or 503, with a [Status].
func (p *Proxy) Healthz() http.Handler { return p.handler(Healthz) }

// Livez returns a handler that answers whether the proxy works: 200 or 503, with a
// [Status].
func (p *Proxy) Livez() http.Handler { return p.handler(Livez) }

func (p *Proxy) handler(c Check) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s := p.Status(c)
		code := http.StatusOK
		if !s.OK() {
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
	// There is nobody to tell that the client has gone.
	_ = json.NewEncoder(w).Encode(body)
}

// taintToBeDeleted is the taint that the cluster autoscaler puts on a node before
// it removes it.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Eligible reports whether a node may get load-balancer traffic: it is not being
// deleted, and the cluster autoscaler has not marked it for removal (taint
// ToBeDeletedByClusterAutoscaler; KEP-3836). A nil node is not eligible.
func Eligible(n *v1.Node) bool {
	return n != nil && n.DeletionTimestamp == nil &&
		!slices.ContainsFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == taintToBeDeleted })
}
