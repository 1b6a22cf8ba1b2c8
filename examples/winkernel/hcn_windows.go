package winkernel

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/Microsoft/hnslib/hcn"
)

// Open returns the service of this machine. It works while the service does not run: each call
// then returns [ErrNotRunning].
func Open() (HNS, error) { return &service{}, nil }

// service is the Host Networking Service, reached by computenetwork.dll. mu guards running, which
// is set once the service told its version.
type service struct {
	mu      sync.Mutex
	running bool
}

// wrap adds the error of this package that fits an error of the library.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	for code, is := range codes {
		if hcn.CheckErrorWithCode(err, hcn.ErrorCode(code)) {
			return fmt.Errorf("%w: %w", is, err)
		}
	}
	if errors.As(err, new(hcn.NetworkNotFoundError)) {
		return fmt.Errorf("%w: %w", ErrNoNetwork, err)
	}
	if hcn.IsNotFoundError(err) {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	return err
}

// convert returns an object of the library as one of this package, or the reverse. Both are encoded as the service's
// documents.
func convert[T any](from any) (out T, err error) {
	text, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	return out, err
}

// features returns what the service supports. The library asks for the version once and keeps
// an error for good, so features asks first whether the service runs.
func (s *service) features() (hcn.SupportedFeatures, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		if _, err := hcn.GetGlobals(); err != nil {
			// The library hides the code of this error.
			return hcn.SupportedFeatures{}, fmt.Errorf("%w: %w", ErrNotRunning, err)
		}
		s.running = true
	}
	has, err := hcn.GetCachedSupportedFeatures()
	return has, wrap(err)
}

func (s *service) Features() (Features, error) {
	has, err := s.features()
	return Features{DSR: has.DSR, Overlay: has.RemoteSubnet, DualStack: has.IPv6DualStack}, err
}

func (*service) Network(name string) (Network, error) {
	n, err := hcn.GetNetworkByName(name)
	if err != nil {
		return Network{}, wrap(err)
	}
	return convert[Network](n)
}

// lists calls a function of the library that lists objects, and converts them. The library opens one object
// after the other, and fails if one of them was deleted since. Then lists tries again.
func lists[T, U any](f func() ([]T, error)) ([]U, error) {
	list, err := f()
	for try := 0; try < 4 && errors.Is(wrap(err), ErrNotFound); try++ {
		list, err = f()
	}
	if err != nil {
		return nil, wrap(err)
	}
	return convert[[]U](list)
}

func (*service) Endpoints() ([]Endpoint, error) {
	return lists[hcn.HostComputeEndpoint, Endpoint](hcn.ListEndpoints)
}

func (*service) CreateEndpoint(e Endpoint) (Endpoint, error) {
	e.ID = ""
	in, err := convert[hcn.HostComputeEndpoint](e)
	if err != nil {
		return Endpoint{}, err
	}
	made, err := (&hcn.HostComputeNetwork{Id: e.Network}).CreateEndpoint(&in)
	if err != nil {
		return Endpoint{}, wrap(err)
	}
	e.ID = strings.ToLower(made.Id)
	return e, nil
}

func (*service) DeleteEndpoint(id string) error {
	return wrap((&hcn.HostComputeEndpoint{Id: id}).Delete())
}

func (*service) LoadBalancers() ([]LoadBalancer, error) {
	return lists[hcn.HostComputeLoadBalancer, LoadBalancer](hcn.ListLoadBalancers)
}

// put calls a function of the library that writes a load balancer.
func put(lb LoadBalancer, write func(*hcn.HostComputeLoadBalancer) (*hcn.HostComputeLoadBalancer, error)) (LoadBalancer, error) {
	lb.ID = "" // not part of the settings
	in, err := convert[hcn.HostComputeLoadBalancer](lb)
	if err != nil {
		return LoadBalancer{}, err
	}
	is, err := write(&in)
	if err != nil {
		return LoadBalancer{}, wrap(err)
	}
	return convert[LoadBalancer](is)
}

func (*service) CreateLoadBalancer(lb LoadBalancer) (LoadBalancer, error) {
	return put(lb, (*hcn.HostComputeLoadBalancer).Create)
}

func (s *service) ModifyLoadBalancer(lb LoadBalancer) (LoadBalancer, error) {
	has, err := s.features()
	if err != nil {
		return LoadBalancer{}, err
	}
	if !has.ModifyLoadbalancer {
		return LoadBalancer{}, ErrNotImplemented
	}
	return put(lb, func(in *hcn.HostComputeLoadBalancer) (*hcn.HostComputeLoadBalancer, error) { return in.Update(lb.ID) })
}

func (*service) DeleteLoadBalancer(id string) error {
	return wrap((&hcn.HostComputeLoadBalancer{Id: id}).Delete())
}
