package health

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// weightHeader holds the number of local endpoints.
const weightHeader = "X-Load-Balancing-Endpoint-Weight"

// ServicesConfig configures a [Services]. The zero value is valid.
type ServicesConfig struct {
	// ProxyHealthy reports whether the proxy works. [Proxy.Healthy] is suitable. It
	// must be safe for concurrent use. Nil means that the proxy always works.
	ProxyHealthy func() bool
}

// Services counts the local ready endpoints of the Services that have a health-check node port. It is a
// [ruleset.Backend]. Its methods are safe for concurrent use. [NewServices] makes one; the zero value must not be
// used.
type Services struct {
	cfg ServicesConfig

	mu    sync.Mutex
	node  string
	ports map[types.NamespacedName]*service
}

// service is one Service with a health-check node port.
type service struct {
	rules map[tracker.Key]*ruleset.Port
	port  uint16
	// local is the number of local ready endpoints in each family of the Service.
	local map[tracker.Family]int
}

// localIn returns the number of local ready endpoints in family f if the Service has
// it, and otherwise those in the Service's own family.
func (e *service) localIn(f tracker.Family) int {
	if n, ok := e.local[f]; ok {
		return n
	}
	all := 0
	for _, n := range e.local {
		all = max(all, n)
	}
	return all
}

// NewServices returns an empty Services.
func NewServices(c ServicesConfig) *Services {
	return &Services{cfg: c, ports: map[types.NamespacedName]*service{}}
}

// Apply applies a delta, as [ruleset.Backend] specifies. It never fails. Its cost is proportional to the endpoints of
// the changed Services with a health-check node port. d must not be nil.
func (s *Services) Apply(_ context.Context, d *ruleset.Delta) error {
	s.apply(d)
	return nil
}

// apply returns the names of the Services whose port may have changed.
func (s *Services) apply(d *ruleset.Delta) map[types.NamespacedName]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := map[types.NamespacedName]bool{}
	if d.Full {
		for name := range s.ports {
			touched[name] = true
		}
		s.ports = map[types.NamespacedName]*service{}
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		name := c.Key.NamespacedName
		e := s.ports[name]
		if c.New != nil && c.New.Spec.HealthCheckNodePort != 0 {
			if e == nil {
				e = &service{rules: map[tracker.Key]*ruleset.Port{}}
				s.ports[name] = e
			}
			e.rules[c.Key] = c.New
		} else if e != nil {
			delete(e.rules, c.Key)
		} else {
			continue
		}
		touched[name] = true
	}
	if d.Node != nil && d.Node.Info.Name != s.node {
		s.node = d.Node.Info.Name
		for name := range s.ports {
			touched[name] = true
		}
	}
	for name := range touched {
		if e := s.ports[name]; e != nil && len(e.rules) == 0 {
			delete(s.ports, name)
		} else if e != nil {
			e.count(s.node)
		}
	}
	return touched
}

// byAge returns the names of Services, the oldest first: the order in which they get scarce files and ports.
func (s *Services) byAge(names map[types.NamespacedName]bool) []types.NamespacedName {
	s.mu.Lock()
	defer s.mu.Unlock()
	port := func(name types.NamespacedName) *tracker.ServicePort {
		if e := s.ports[name]; e != nil {
			for _, r := range e.rules {
				return r.Spec // all have the Service's age
			}
		}
		return &tracker.ServicePort{}
	}
	return slices.SortedFunc(maps.Keys(names), func(a, b types.NamespacedName) int {
		return cmp.Or(port(a).CompareAge(port(b)), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

func (e *service) count(node string) {
	e.port, e.local = 0, map[tracker.Family]int{}
	seen := map[netip.Addr]bool{}
	var from tracker.Key
	for key, r := range e.rules {
		// The ports of a Service differ in their health-check node port only between two changes. Then the first by
		// key wins.
		if e.port == 0 || key.Compare(from) < 0 {
			e.port, from = r.Spec.HealthCheckNodePort, key
		}
		e.local[key.Family] += 0 // make an entry for the family
		for _, ep := range r.Endpoints {
			if a := ep.Addr.Addr(); ep.Ready && ep.IsLocal(node) && !seen[a] {
				seen[a] = true
				e.local[key.Family]++
			}
		}
	}
}

// Get returns a Service's health-check node port and its number of local ready endpoints for clients of the family,
// as in [Services.Handler]. ok is false if there is no such Service.
func (s *Services) Get(name types.NamespacedName, family tracker.Family) (port uint16, localEndpoints int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.ports[name]
	if e == nil {
		return 0, 0, false
	}
	return e.port, e.localIn(family), true
}

func (s *Services) port(name types.NamespacedName) (uint16, bool) {
	port, _, ok := s.Get(name, 0)
	return port, ok
}

// response is the body of a Service's health check.
type response struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// Handler returns a handler for the health check of one Service, for clients that reach the node at an address of the
// given family. If the Service has a cluster IP in that family, the handler counts the local endpoints of that family
// only, and otherwise those of the other family: a load balancer may check another address than it sends traffic to.
// A Service that is unknown or has no health-check node port has no local endpoints.
func (s *Services) Handler(name types.NamespacedName, family tracker.Family) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { s.serve(w, name, family) })
}

func (s *Services) serve(w http.ResponseWriter, name types.NamespacedName, family tracker.Family) {
	_, local, _ := s.Get(name, family)
	a := response{LocalEndpoints: local, ServiceProxyHealthy: s.cfg.ProxyHealthy == nil || s.cfg.ProxyHealthy()}
	a.Service.Namespace, a.Service.Name = name.Namespace, name.Name
	code := http.StatusOK
	if a.LocalEndpoints == 0 || !a.ServiceProxyHealthy {
		code = http.StatusServiceUnavailable
	}
	w.Header().Set(weightHeader, strconv.Itoa(local))
	writeJSON(w, code, a)
}
