package winkernel

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/Microsoft/hnslib/hcn"
	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
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

// schema is the version of the service's JSON schema (HNS API version 2).
var schema = hcn.SchemaVersion{Major: 2}

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

func (s *service) Supports(f Feature) error {
	has, err := s.features()
	if err != nil {
		return err
	}
	if !map[Feature]bool{DSR: has.DSR, RemoteSubnets: has.RemoteSubnet, DualStack: has.IPv6DualStack}[f] {
		return ErrNotImplemented
	}
	return nil
}

func (*service) Network(name string) (Network, error) {
	n, err := hcn.GetNetworkByName(name)
	if err != nil {
		return Network{}, wrap(err)
	}
	out := Network{ID: strings.ToLower(n.Id), Name: n.Name, Type: NetworkType(n.Type)}
	for _, t := range []NetworkType{L2Bridge, Overlay} {
		if strings.EqualFold(string(n.Type), string(t)) {
			out.Type = t
		}
	}
	for _, p := range n.Policies {
		if p.Type != hcn.RemoteSubnetRoute {
			continue
		}
		var route hcn.RemoteSubnetRoutePolicySetting
		if err := json.Unmarshal(p.Settings, &route); err != nil {
			return Network{}, fmt.Errorf("policy %s of network %q: %w", p.Type, name, err)
		}
		prefix, err := netip.ParsePrefix(route.DestinationPrefix)
		if err != nil {
			return Network{}, fmt.Errorf("remote subnet of network %q: %w", name, err)
		}
		provider, err := netip.ParseAddr(route.ProviderAddress)
		if err != nil {
			return Network{}, fmt.Errorf("remote subnet %v of network %q: %w", prefix, name, err)
		}
		out.RemoteSubnets = append(out.RemoteSubnets, RemoteSubnet{prefix.Masked(), provider})
	}
	slices.SortFunc(out.RemoteSubnets, func(a, b RemoteSubnet) int { return a.Prefix.Compare(b.Prefix) })
	return out, nil
}

// lists calls a function of the library that lists objects, and converts them. The library opens one object
// after the other, and fails if one of them was deleted since. Then lists tries again.
func lists[T, U any](f func() ([]T, error), convert func(*T) U) ([]U, error) {
	list, err := f()
	for try := 0; try < 4 && errors.Is(wrap(err), ErrNotFound); try++ {
		list, err = f()
	}
	if err != nil {
		return nil, wrap(err)
	}
	out := make([]U, 0, len(list))
	for i := range list {
		out = append(out, convert(&list[i]))
	}
	return out, nil
}

func (*service) Endpoints() ([]Endpoint, error) { return lists(hcn.ListEndpoints, endpointOf) }

// endpointOf converts an endpoint. It leaves out what it cannot read, because the endpoint may
// be another program's.
func endpointOf(e *hcn.HostComputeEndpoint) Endpoint {
	out := Endpoint{ID: strings.ToLower(e.Id), Network: strings.ToLower(e.HostComputeNetwork), Name: e.Name,
		MAC: normalizeMAC(e.MacAddress), Remote: e.Flags&hcn.EndpointFlagsRemoteEndpoint != 0}
	for _, c := range e.IpConfigurations {
		if a, err := netip.ParseAddr(c.IpAddress); err == nil {
			out.Addrs = append(out.Addrs, a.Unmap())
		}
	}
	for _, p := range e.Policies {
		var s hcn.ProviderAddressEndpointPolicySetting
		if p.Type == hcn.NetworkProviderAddress && json.Unmarshal(p.Settings, &s) == nil {
			out.Provider, _ = netip.ParseAddr(s.ProviderAddress)
		}
	}
	return out
}

func (*service) CreateEndpoint(e Endpoint) (Endpoint, error) {
	n := &hcn.HostComputeNetwork{Id: e.Network}
	in := &hcn.HostComputeEndpoint{Name: e.Name, MacAddress: e.MAC, SchemaVersion: schema}
	for _, a := range e.Addrs {
		in.IpConfigurations = append(in.IpConfigurations, hcn.IpConfig{IpAddress: a.String(), PrefixLength: uint8(a.BitLen())})
	}
	if e.Provider.IsValid() {
		s, err := json.Marshal(hcn.ProviderAddressEndpointPolicySetting{ProviderAddress: e.Provider.String()})
		if err != nil {
			return Endpoint{}, err
		}
		in.Policies = []hcn.EndpointPolicy{{Type: hcn.NetworkProviderAddress, Settings: s}}
	}
	create := n.CreateEndpoint
	if e.Remote {
		create = n.CreateRemoteEndpoint
	}
	made, err := create(in)
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
	return lists(hcn.ListLoadBalancers, loadBalancerOf)
}

// protocols maps the protocols to their numbers (IANA).
var protocols = map[v1.Protocol]uint32{v1.ProtocolTCP: 6, v1.ProtocolUDP: 17, v1.ProtocolSCTP: 132}

// loadBalancerOf converts a load balancer. The Frontend is the zero value if it does not have
// exactly one port and at most one address.
func loadBalancerOf(lb *hcn.HostComputeLoadBalancer) LoadBalancer {
	out := LoadBalancer{ID: strings.ToLower(lb.Id), DSR: lb.Flags&hcn.LoadBalancerFlagsDSR != 0}
	for _, id := range lb.HostComputeEndpoints {
		out.Endpoints = append(out.Endpoints, strings.ToLower(id))
	}
	slices.Sort(out.Endpoints)
	out.SourceVIP, _ = netip.ParseAddr(lb.SourceVIP)
	if len(lb.PortMappings) != 1 || len(lb.FrontendVIPs) > 1 {
		return out
	}
	f := Frontend{Port: lb.PortMappings[0].ExternalPort, Family: tracker.IPv4}
	if lb.Flags&hcn.LoadBalancerFlagsIPv6 != 0 {
		f.Family = tracker.IPv6
	}
	for p, n := range protocols {
		if n == lb.PortMappings[0].Protocol {
			f.Protocol = p
		}
	}
	if len(lb.FrontendVIPs) == 1 && lb.FrontendVIPs[0] != "" {
		vip, err := netip.ParseAddr(lb.FrontendVIPs[0])
		if err != nil {
			return out
		}
		f.VIP = vip.Unmap()
	}
	if f.Protocol == "" {
		return out
	}
	out.Frontend, out.InternalPort = f, lb.PortMappings[0].InternalPort
	out.Flags = PortFlags(lb.PortMappings[0].Flags)
	out.ClientAffinity = lb.PortMappings[0].DistributionType == hcn.LoadBalancerDistributionSourceIP
	return out
}

// settings converts a load balancer for the library.
func (lb *LoadBalancer) settings() *hcn.HostComputeLoadBalancer {
	out := &hcn.HostComputeLoadBalancer{HostComputeEndpoints: lb.Endpoints, SchemaVersion: schema}
	port := hcn.LoadBalancerPortMapping{Protocol: protocols[lb.Frontend.Protocol], InternalPort: lb.InternalPort,
		ExternalPort: lb.Frontend.Port, Flags: hcn.LoadBalancerPortMappingFlags(lb.Flags)}
	if lb.ClientAffinity {
		port.DistributionType = hcn.LoadBalancerDistributionSourceIP
	}
	out.PortMappings = []hcn.LoadBalancerPortMapping{port}
	if lb.DSR {
		out.Flags |= hcn.LoadBalancerFlagsDSR
	}
	if lb.Frontend.Family == tracker.IPv6 {
		out.Flags |= hcn.LoadBalancerFlagsIPv6
	}
	if lb.SourceVIP.IsValid() {
		out.SourceVIP = lb.SourceVIP.String()
	}
	if lb.Frontend.VIP.IsValid() {
		out.FrontendVIPs = []string{lb.Frontend.VIP.String()}
	}
	return out
}

func (*service) CreateLoadBalancer(lb LoadBalancer) (LoadBalancer, error) {
	made, err := lb.settings().Create()
	if err != nil {
		return LoadBalancer{}, wrap(err)
	}
	return loadBalancerOf(made), nil
}

func (s *service) ModifyLoadBalancer(lb LoadBalancer) (LoadBalancer, error) {
	has, err := s.features()
	if err != nil {
		return LoadBalancer{}, err
	}
	if !has.ModifyLoadbalancer {
		return LoadBalancer{}, ErrNotImplemented
	}
	is, err := lb.settings().Update(lb.ID)
	if err != nil {
		return LoadBalancer{}, wrap(err)
	}
	return loadBalancerOf(is), nil
}

func (*service) DeleteLoadBalancer(id string) error {
	return wrap((&hcn.HostComputeLoadBalancer{Id: id}).Delete())
}
