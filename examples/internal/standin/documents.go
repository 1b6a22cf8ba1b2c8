package standin

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/tracker"
)

// The documents of the service's interface, version 2, as far as they matter here.
type (
	networkDocument struct {
		ID, Name, Type string
		Policies       []policy `json:",omitempty"`
		SchemaVersion  version
	}
	endpointDocument struct {
		ID, Name, HostComputeNetwork string
		Policies                     []policy  `json:",omitempty"`
		IPConfigurations             []address `json:"IpConfigurations,omitempty"`
		MacAddress                   string
		Flags                        uint32
		SchemaVersion                version
	}
	loadBalancerDocument struct {
		ID                   string
		HostComputeEndpoints []string
		SourceVIP            string   `json:",omitempty"`
		FrontendVIPs         []string `json:",omitempty"`
		PortMappings         []portMapping
		Flags                uint32
		SchemaVersion        version
	}
	portMapping struct {
		Protocol, DistributionType, Flags uint32
		InternalPort, ExternalPort        uint16
	}
	address struct {
		IPAddress    string `json:"IpAddress"`
		PrefixLength int
	}
	policy struct {
		Type     string
		Settings map[string]any
	}
	version struct{ Major, Minor int }
)

// The flags and numbers of the documents (hcsshim, hcn).
const (
	endpointRemote       = 1
	loadBalancerDSR      = 1
	loadBalancerIPv6     = 2
	distributionSourceIP = 2
)

var protocols = map[uint32]v1.Protocol{6: v1.ProtocolTCP, 17: v1.ProtocolUDP, 132: v1.ProtocolSCTP}

// enumerate returns the IDs of the objects that a query selects.
func enumerate(service *fakehns.Service, kind string, query []byte) ([]string, error) {
	var q struct{ Filter string }
	if err := json.Unmarshal(query, &q); err != nil {
		return nil, err
	}
	var want struct{ ID, Name, VirtualNetwork, HostComputeNetwork string }
	if q.Filter != "" {
		if err := json.Unmarshal([]byte(q.Filter), &want); err != nil {
			return nil, err
		}
	}
	out := []string{}
	add := func(id, name, network string) {
		if (want.ID == "" || strings.EqualFold(want.ID, id)) && (want.Name == "" || want.Name == name) &&
			(want.VirtualNetwork == "" || strings.EqualFold(want.VirtualNetwork, network)) &&
			(want.HostComputeNetwork == "" || strings.EqualFold(want.HostComputeNetwork, network)) {
			out = append(out, id)
		}
	}
	switch kind {
	case network:
		n, err := service.Current()
		if add(n.ID, n.Name, ""); err != nil {
			return nil, err
		}
	case endpoint:
		list, err := service.Endpoints()
		for _, e := range list {
			add(e.ID, e.Name, e.Network)
		}
		return out, err
	case loadBalancer:
		list, err := service.LoadBalancers()
		for _, lb := range list {
			add(lb.ID, "", "")
		}
		return out, err
	}
	return out, nil
}

func document(service *fakehns.Service, kind, id string) (any, error) {
	switch kind {
	case network:
		n, err := service.Current()
		if err == nil && !strings.EqualFold(n.ID, id) {
			err = winkernel.ErrNotFound
		}
		out := networkDocument{ID: n.ID, Name: n.Name, Type: string(n.Type), SchemaVersion: version{2, 0}}
		for _, s := range n.RemoteSubnets {
			out.Policies = append(out.Policies, policy{"RemoteSubnetRoute", map[string]any{
				"DestinationPrefix": s.Prefix.String(), "ProviderAddress": s.Provider.String(), "IsolationId": 4096,
				"DistributedRouterMacAddress": "02-11-00-00-00-01",
			}})
		}
		return out, err
	case endpoint:
		e, err := service.Endpoint(id)
		return describeEndpoint(e), err
	}
	lb, err := service.LoadBalancer(id)
	return describeLoadBalancer(lb), err
}

func describeEndpoint(e winkernel.Endpoint) endpointDocument {
	out := endpointDocument{ID: e.ID, Name: e.Name, HostComputeNetwork: e.Network, MacAddress: strings.ToUpper(e.MAC), SchemaVersion: version{2, 0}}
	for _, a := range e.Addrs {
		out.IPConfigurations = append(out.IPConfigurations, address{a.String(), a.BitLen()})
	}
	if e.Remote {
		out.Flags = endpointRemote
	}
	if e.Provider.IsValid() {
		out.Policies = []policy{{"ProviderAddress", map[string]any{"ProviderAddress": e.Provider.String()}}}
	}
	return out
}

func describeLoadBalancer(lb winkernel.LoadBalancer) loadBalancerDocument {
	out := loadBalancerDocument{ID: lb.ID, HostComputeEndpoints: lb.Endpoints, SchemaVersion: version{2, 0}}
	if lb.Frontend == (winkernel.Frontend{}) {
		return out // half made
	}
	if lb.Frontend.VIP.IsValid() {
		out.FrontendVIPs = []string{lb.Frontend.VIP.String()}
	}
	if lb.SourceVIP.IsValid() {
		out.SourceVIP = lb.SourceVIP.String()
	}
	if lb.DSR {
		out.Flags |= loadBalancerDSR
	}
	if lb.Frontend.Family == tracker.IPv6 {
		out.Flags |= loadBalancerIPv6
	}
	m := portMapping{InternalPort: lb.InternalPort, ExternalPort: lb.Frontend.Port, Flags: uint32(lb.Flags)}
	for number, p := range protocols {
		if p == lb.Frontend.Protocol {
			m.Protocol = number
		}
	}
	if lb.ClientAffinity {
		m.DistributionType = distributionSourceIP
	}
	out.PortMappings = []portMapping{m}
	return out
}

// createEndpoint creates the endpoint of a document.
func createEndpoint(service *fakehns.Service, network string, body []byte) (string, error) {
	var d endpointDocument
	if err := json.Unmarshal(body, &d); err != nil {
		return "", err
	}
	e := winkernel.Endpoint{Network: network, Name: d.Name, MAC: strings.ToLower(strings.ReplaceAll(d.MacAddress, ":", "-")), Remote: d.Flags&endpointRemote != 0}
	for _, c := range d.IPConfigurations {
		a, err := netip.ParseAddr(c.IPAddress)
		if err != nil {
			return "", err
		}
		if c.PrefixLength != 0 && c.PrefixLength > a.BitLen() {
			return "", fmt.Errorf("prefix length %d of %v", c.PrefixLength, a)
		}
		e.Addrs = append(e.Addrs, a)
	}
	for _, p := range d.Policies {
		if text, ok := p.Settings["ProviderAddress"].(string); ok && p.Type == "ProviderAddress" {
			e.Provider, _ = netip.ParseAddr(text)
		}
	}
	made, err := service.CreateEndpoint(e)
	return made.ID, err
}

// writeLoadBalancer creates or modifies the load balancer of a document.
func writeLoadBalancer(service *fakehns.Service, verb, id string, body []byte) (string, error) {
	lb, err := parseLoadBalancer(body)
	if err != nil {
		return "", err
	}
	if verb == "Modify" {
		lb.ID = id
		_, err = service.ModifyLoadBalancer(lb)
		return id, err
	}
	made, err := service.CreateLoadBalancer(lb)
	return made.ID, err
}

func parseLoadBalancer(body []byte) (winkernel.LoadBalancer, error) {
	var d loadBalancerDocument
	var out winkernel.LoadBalancer
	if err := json.Unmarshal(body, &d); err != nil {
		return out, err
	}
	if len(d.PortMappings) != 1 || len(d.FrontendVIPs) > 1 {
		return out, fmt.Errorf("%d port mappings and %d addresses", len(d.PortMappings), len(d.FrontendVIPs))
	}
	m := d.PortMappings[0]
	out = winkernel.LoadBalancer{
		Frontend:     winkernel.Frontend{Port: m.ExternalPort, Protocol: protocols[m.Protocol], Family: tracker.IPv4},
		InternalPort: m.InternalPort, Endpoints: d.HostComputeEndpoints, DSR: d.Flags&loadBalancerDSR != 0,
		Flags: winkernel.PortFlags(m.Flags), ClientAffinity: m.DistributionType == distributionSourceIP,
	}
	slices.Sort(out.Endpoints)
	if d.Flags&loadBalancerIPv6 != 0 {
		out.Frontend.Family = tracker.IPv6
	}
	var err error
	if len(d.FrontendVIPs) == 1 {
		if out.Frontend.VIP, err = netip.ParseAddr(d.FrontendVIPs[0]); err != nil {
			return out, err
		}
	}
	if d.SourceVIP != "" {
		out.SourceVIP, err = netip.ParseAddr(d.SourceVIP)
	}
	return out, err
}
