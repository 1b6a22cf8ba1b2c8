// Package fakehns is Windows' Host Networking Service in memory, for tests on every system. It
// follows the rules in hcsshim, hnslib and reports of users: it refuses a second load balancer
// for a frontend, a load balancer with an endpoint that does not exist, and an endpoint at an
// address that another one has. It lists objects in random order. It moves no packets.
package fakehns

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"

	"github.com/go-proxier/proxier/examples/winkernel"
)

// Call is the name of a call of the service that writes.
type Call string

// The calls.
const (
	CreateEndpoint     Call = "CreateEndpoint"
	DeleteEndpoint     Call = "DeleteEndpoint"
	CreateLoadBalancer Call = "CreateLoadBalancer"
	ModifyLoadBalancer Call = "ModifyLoadBalancer"
	DeleteLoadBalancer Call = "DeleteLoadBalancer"
	// Read counts the objects that were read: a list of n objects is n+1 calls of Windows.
	Read Call = "Read"
)

// The errors of the service.
const (
	notRunning     winkernel.Code = 0x800706b5 // RPC_S_UNKNOWN_IF
	noNetwork      winkernel.Code = 0x803b0001 // HCN_E_NETWORK_NOT_FOUND
	noEndpoint     winkernel.Code = 0x803b0002 // HCN_E_ENDPOINT_NOT_FOUND
	portExists     winkernel.Code = 0x803b0013 // HCN_E_PORT_ALREADY_EXISTS
	addrReserved   winkernel.Code = 0x803b002f // HCN_E_ADDR_INVALID_OR_RESERVED
	notImplemented winkernel.Code = 0x80004001 // E_NOTIMPL
	notFound       winkernel.Code = 0x80070490 // ERROR_NOT_FOUND
)

// Service is a [winkernel.HNS] in memory. It must be made with [New]. Its methods are safe for
// concurrent use.
type Service struct {
	// Before, if not nil, is called before each call that writes takes effect. If it returns
	// an error, the call has no effect and returns the error.
	Before func(Call) error
	// After, if not nil, is called after each call that wrote.
	After func(Call)
	// Has is what the service supports; New sets everything.
	Has winkernel.Features

	mu        sync.Mutex
	network   winkernel.Network
	endpoints map[string]winkernel.Endpoint
	lbs       map[string]winkernel.LoadBalancer
	lastID    int
	stopped   bool
	noModify  bool
	calls     map[Call]int
	mistakes  []string
}

// New returns a service with one network. If modify is false, the service cannot modify load
// balancers, like Windows Server 2019.
func New(n winkernel.Network, modify bool) *Service {
	return &Service{network: n, endpoints: map[string]winkernel.Endpoint{}, lbs: map[string]winkernel.LoadBalancer{},
		Has: winkernel.Features{DSR: true, Overlay: true, DualStack: true}, noModify: !modify, calls: map[Call]int{}}
}

// lock locks the service, and returns the function that unlocks it.
func (s *Service) lock() func() {
	s.mu.Lock()
	return s.mu.Unlock
}

func (s *Service) id() string {
	s.lastID++
	return fmt.Sprintf("%08x-0000-4000-8000-000000000000", s.lastID)
}

// SetNetwork changes the network. If its ID differs, the service forgets its endpoints and all
// load balancers, as if the network had been rebuilt.
func (s *Service) SetNetwork(n winkernel.Network) {
	defer s.lock()()
	if n.ID != s.network.ID {
		maps.DeleteFunc(s.endpoints, func(_ string, e winkernel.Endpoint) bool { return e.Network == s.network.ID })
		clear(s.lbs)
	}
	s.network = n
}

// Plug makes an endpoint as the network plugin does, whatever exists. It returns the endpoint's ID.
func (s *Service) Plug(e winkernel.Endpoint) string {
	defer s.lock()()
	e.ID = s.id()
	if e.Network == "" {
		e.Network = s.network.ID
	}
	s.endpoints[e.ID] = e
	return e.ID
}

// Unplug deletes the local endpoint with an address as the network plugin does. Load balancers
// lose it.
func (s *Service) Unplug(a netip.Addr) {
	defer s.lock()()
	for id, e := range s.endpoints {
		if e.Remote || !slices.Contains(e.Addrs, a) {
			continue
		}
		delete(s.endpoints, id)
		for k, lb := range s.lbs {
			lb.Endpoints = slices.DeleteFunc(slices.Clone(lb.Endpoints), func(has string) bool { return has == id })
			s.lbs[k] = lb
		}
	}
}

// Place makes a load balancer whatever exists, like an earlier process or another program.
func (s *Service) Place(lb winkernel.LoadBalancer) string {
	defer s.lock()()
	lb.ID = s.id()
	s.lbs[lb.ID] = lb
	return lb.ID
}

// Run starts or stops the service. While it is stopped every call fails, and it keeps its objects.
func (s *Service) Run(run bool) {
	defer s.lock()()
	s.stopped = !run
}

// Calls returns the number of calls since the last call of Calls.
func (s *Service) Calls() map[Call]int {
	defer s.lock()()
	out := s.calls
	s.calls = map[Call]int{}
	return out
}

// Mistakes returns the caller's deletions that may do harm on Windows: of an endpoint of a load
// balancer, and of an endpoint of the network plugin.
func (s *Service) Mistakes() []string {
	defer s.lock()()
	return slices.Clone(s.mistakes)
}

// Current returns the network.
func (s *Service) Current() (winkernel.Network, error) {
	defer s.lock()()
	if s.stopped {
		return winkernel.Network{}, notRunning
	}
	return s.network, nil
}

// Endpoint returns the endpoint with an ID.
func (s *Service) Endpoint(id string) (winkernel.Endpoint, error) {
	defer s.lock()()
	return get(s, s.endpoints, id, noEndpoint)
}

// LoadBalancer returns the load balancer with an ID.
func (s *Service) LoadBalancer(id string) (winkernel.LoadBalancer, error) {
	defer s.lock()()
	return get(s, s.lbs, id, notFound)
}

func get[T any](s *Service, m map[string]T, id string, missing error) (T, error) {
	o, ok := m[id]
	switch {
	case s.stopped:
		return o, notRunning
	case !ok:
		return o, fmt.Errorf("object %s: %w", id, missing)
	}
	return o, nil
}

// Find returns the load balancer of a frontend and its endpoints. An endpoint that does not
// exist is the zero Endpoint.
func (s *Service) Find(f winkernel.Frontend) (winkernel.LoadBalancer, []winkernel.Endpoint, bool) {
	defer s.lock()()
	for _, lb := range s.lbs {
		if lb.Frontend == f {
			out := make([]winkernel.Endpoint, len(lb.Endpoints))
			for i, id := range lb.Endpoints {
				out[i] = s.endpoints[id]
			}
			return lb, out, true
		}
	}
	return winkernel.LoadBalancer{}, nil, false
}

// Features implements [winkernel.HNS].
func (s *Service) Features() (winkernel.Features, error) { return s.Has, nil }

// Network implements [winkernel.HNS].
func (s *Service) Network(name string) (winkernel.Network, error) {
	n, err := s.Current()
	defer s.lock()()
	s.calls[Read]++
	if err == nil && name != n.Name {
		err = fmt.Errorf("network %q: %w", name, noNetwork)
	}
	return n, err
}

// Endpoints implements [winkernel.HNS].
func (s *Service) Endpoints() ([]winkernel.Endpoint, error) {
	defer s.lock()()
	return list(s, s.endpoints)
}

// LoadBalancers implements [winkernel.HNS].
func (s *Service) LoadBalancers() ([]winkernel.LoadBalancer, error) {
	defer s.lock()()
	return list(s, s.lbs)
}

func list[T any](s *Service, m map[string]T) ([]T, error) {
	s.calls[Read] += len(m) + 1
	if s.stopped {
		return nil, notRunning
	}
	out := slices.Collect(maps.Values(m))
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out, nil
}

func (s *Service) write(c Call, f func() error) error {
	unlock := s.lock()
	s.calls[c]++
	before, after := s.Before, s.After
	unlock()
	if before != nil {
		if err := before(c); err != nil {
			return err
		}
	}
	unlock = s.lock()
	err := error(notRunning)
	if !s.stopped {
		err = f()
	}
	unlock()
	if err == nil && after != nil {
		after(c)
	}
	return err
}

// CreateEndpoint implements [winkernel.HNS].
func (s *Service) CreateEndpoint(e winkernel.Endpoint) (winkernel.Endpoint, error) {
	err := s.write(CreateEndpoint, func() error {
		if e.Network != s.network.ID {
			return fmt.Errorf("network %s: %w", e.Network, noNetwork)
		}
		for _, o := range s.endpoints {
			if o.Network == e.Network && slices.ContainsFunc(e.Addrs, func(a netip.Addr) bool { return slices.Contains(o.Addrs, a) }) {
				return fmt.Errorf("endpoint %v: %w", e.Addrs, addrReserved)
			}
		}
		e.ID = s.id()
		s.endpoints[e.ID] = e
		return nil
	})
	return e, err
}

// DeleteEndpoint implements [winkernel.HNS].
func (s *Service) DeleteEndpoint(id string) error {
	return s.write(DeleteEndpoint, func() error {
		e, ok := s.endpoints[id]
		if !ok {
			return fmt.Errorf("endpoint %s: %w", id, noEndpoint)
		}
		if !e.Remote {
			s.mistakes = append(s.mistakes, fmt.Sprintf("deleted the local endpoint %v", e.Addrs))
		}
		for _, lb := range s.lbs {
			if slices.Contains(lb.Endpoints, id) || s.network.Type == winkernel.Overlay && slices.Contains(e.Addrs, lb.Frontend.VIP) {
				s.mistakes = append(s.mistakes, fmt.Sprintf("deleted endpoint %v of load balancer %v", e.Addrs, lb.Frontend))
			}
		}
		delete(s.endpoints, id)
		return nil
	})
}

// CreateLoadBalancer implements [winkernel.HNS].
func (s *Service) CreateLoadBalancer(lb winkernel.LoadBalancer) (winkernel.LoadBalancer, error) {
	err := s.write(CreateLoadBalancer, func() error {
		lb.ID = s.id()
		return s.put(lb)
	})
	return lb, err
}

// ModifyLoadBalancer implements [winkernel.HNS].
func (s *Service) ModifyLoadBalancer(lb winkernel.LoadBalancer) (winkernel.LoadBalancer, error) {
	err := s.write(ModifyLoadBalancer, func() error {
		if s.noModify {
			return notImplemented
		}
		if _, ok := s.lbs[lb.ID]; !ok {
			return fmt.Errorf("load balancer %s: %w", lb.ID, notFound)
		}
		return s.put(lb)
	})
	return lb, err
}

// put stores a load balancer, or returns an error if the service refuses it.
func (s *Service) put(lb winkernel.LoadBalancer) error {
	for _, id := range lb.Endpoints {
		if _, ok := s.endpoints[id]; !ok {
			return fmt.Errorf("endpoint %s: %w", id, noEndpoint)
		}
	}
	for _, o := range s.lbs {
		if o.Frontend == lb.Frontend && o.ID != lb.ID {
			return fmt.Errorf("load balancer %v: %w", lb.Frontend, portExists)
		}
	}
	lb.Endpoints = slices.Clone(lb.Endpoints)
	s.lbs[lb.ID] = lb
	return nil
}

// DeleteLoadBalancer implements [winkernel.HNS].
func (s *Service) DeleteLoadBalancer(id string) error {
	return s.write(DeleteLoadBalancer, func() error {
		if _, ok := s.lbs[id]; !ok {
			return fmt.Errorf("load balancer %s: %w", id, notFound)
		}
		delete(s.lbs, id)
		return nil
	})
}
