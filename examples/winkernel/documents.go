package winkernel

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// The documents of the service's interface, version 2, as far as they matter here (hnslib, hcn).
type (
	networkDocument struct {
		ID, Name, Type string
		Policies       []policy `json:",omitempty"`
		SchemaVersion  version
	}
	endpointDocument struct {
		ID                       string `json:",omitempty"`
		Name, HostComputeNetwork string
		Policies                 []policy    `json:",omitempty"`
		IPConfigurations         []ipAddress `json:"IpConfigurations,omitempty"`
		MacAddress               string
		Flags                    uint32
		SchemaVersion            version
	}
	loadBalancerDocument struct {
		ID                   string `json:",omitempty"`
		HostComputeEndpoints []string
		SourceVIP            string        `json:",omitempty"`
		FrontendVIPs         []string      `json:",omitempty"`
		PortMappings         []portMapping `json:",omitempty"`
		Flags                uint32
		SchemaVersion        version
	}
	portMapping struct {
		Protocol, DistributionType, Flags uint32
		InternalPort, ExternalPort        uint16
	}
	ipAddress struct {
		IPAddress    string `json:"IpAddress"`
		PrefixLength int
	}
	policy struct {
		Type     string
		Settings json.RawMessage
	}
	// route has the settings of a remotePolicy. Those of a providerPolicy have no prefix.
	route struct {
		DestinationPrefix netip.Prefix `json:",omitzero"`
		ProviderAddress   netip.Addr
	}
	version struct{ Major, Minor int }
)

// The flags and names in the documents.
const (
	endpointRemote       = 1
	loadBalancerDSR      = 1
	loadBalancerIPv6     = 2
	distributionSourceIP = 2
	remotePolicy         = "RemoteSubnetRoute"
	providerPolicy       = "ProviderAddress"
)

var schema = version{Major: 2}

// protocols maps the numbers of protocols (IANA) to their names.
var protocols = map[uint32]v1.Protocol{6: v1.ProtocolTCP, 17: v1.ProtocolUDP, 132: v1.ProtocolSCTP}

func policyOf(kind string, r route) policy {
	settings, _ := json.Marshal(r) // addresses can always be encoded
	return policy{kind, settings}
}

// MarshalJSON returns the network's document of HNS.
func (n Network) MarshalJSON() ([]byte, error) {
	d := networkDocument{ID: n.ID, Name: n.Name, Type: string(n.Type), SchemaVersion: schema}
	for _, s := range n.RemoteSubnets {
		d.Policies = append(d.Policies, policyOf(remotePolicy, route{s.Prefix, s.Provider}))
	}
	return json.Marshal(d)
}

// UnmarshalJSON reads the network's document of HNS.
func (n *Network) UnmarshalJSON(text []byte) error {
	var d networkDocument
	if err := json.Unmarshal(text, &d); err != nil {
		return err
	}
	*n = Network{ID: strings.ToLower(d.ID), Name: d.Name, Type: NetworkType(d.Type)}
	for _, t := range []NetworkType{L2Bridge, Overlay} {
		if strings.EqualFold(d.Type, string(t)) {
			n.Type = t
		}
	}
	for _, p := range d.Policies {
		if p.Type != remotePolicy {
			continue
		}
		var r route
		if err := json.Unmarshal(p.Settings, &r); err != nil {
			return fmt.Errorf("policy %s of network %q: %w", p.Type, n.Name, err)
		}
		n.RemoteSubnets = append(n.RemoteSubnets, RemoteSubnet{r.DestinationPrefix.Masked(), r.ProviderAddress})
	}
	slices.SortFunc(n.RemoteSubnets, func(a, b RemoteSubnet) int { return a.Prefix.Compare(b.Prefix) })
	return nil
}

// MarshalJSON returns the endpoint's document of HNS.
func (e Endpoint) MarshalJSON() ([]byte, error) {
	d := endpointDocument{ID: e.ID, Name: e.Name, HostComputeNetwork: e.Network, MacAddress: e.MAC, SchemaVersion: schema}
	for _, a := range e.Addrs {
		d.IPConfigurations = append(d.IPConfigurations, ipAddress{a.String(), a.BitLen()})
	}
	if e.Remote {
		d.Flags = endpointRemote
	}
	if e.Provider.IsValid() {
		d.Policies = []policy{policyOf(providerPolicy, route{ProviderAddress: e.Provider})}
	}
	return json.Marshal(d)
}

// UnmarshalJSON reads the endpoint's document of HNS. It leaves out addresses that it cannot read, because the
// endpoint may be another program's.
func (e *Endpoint) UnmarshalJSON(text []byte) error {
	var d endpointDocument
	if err := json.Unmarshal(text, &d); err != nil {
		return err
	}
	*e = Endpoint{ID: strings.ToLower(d.ID), Network: strings.ToLower(d.HostComputeNetwork), Name: d.Name,
		MAC: normalizeMAC(d.MacAddress), Remote: d.Flags&endpointRemote != 0}
	for _, c := range d.IPConfigurations {
		if a, err := netip.ParseAddr(c.IPAddress); err == nil {
			e.Addrs = append(e.Addrs, a.Unmap())
		}
	}
	for _, p := range d.Policies {
		var r route
		if p.Type == providerPolicy && json.Unmarshal(p.Settings, &r) == nil {
			e.Provider = r.ProviderAddress
		}
	}
	return nil
}

// MarshalJSON returns the load balancer's document of HNS, without a port if the Frontend is the zero value.
func (lb LoadBalancer) MarshalJSON() ([]byte, error) {
	d := loadBalancerDocument{ID: lb.ID, HostComputeEndpoints: lb.Endpoints, SchemaVersion: schema}
	m := portMapping{InternalPort: lb.InternalPort, ExternalPort: lb.Frontend.Port, Flags: uint32(lb.Flags)}
	for number, p := range protocols {
		if p == lb.Frontend.Protocol {
			m.Protocol = number
		}
	}
	if lb.ClientAffinity {
		m.DistributionType = distributionSourceIP
	}
	if lb.Frontend != (Frontend{}) {
		d.PortMappings = []portMapping{m}
	}
	if lb.DSR {
		d.Flags |= loadBalancerDSR
	}
	if lb.Frontend.Family == tracker.IPv6 {
		d.Flags |= loadBalancerIPv6
	}
	if lb.SourceVIP.IsValid() {
		d.SourceVIP = lb.SourceVIP.String()
	}
	if lb.Frontend.VIP.IsValid() {
		d.FrontendVIPs = []string{lb.Frontend.VIP.String()}
	}
	return json.Marshal(d)
}

// UnmarshalJSON reads the load balancer's document of HNS. The Frontend is the zero value if it does not have
// exactly one port, at most one address, and a known protocol.
func (lb *LoadBalancer) UnmarshalJSON(text []byte) error {
	var d loadBalancerDocument
	if err := json.Unmarshal(text, &d); err != nil {
		return err
	}
	*lb = LoadBalancer{ID: strings.ToLower(d.ID), DSR: d.Flags&loadBalancerDSR != 0}
	for _, id := range d.HostComputeEndpoints {
		lb.Endpoints = append(lb.Endpoints, strings.ToLower(id))
	}
	slices.Sort(lb.Endpoints)
	lb.SourceVIP, _ = netip.ParseAddr(d.SourceVIP)
	if len(d.PortMappings) != 1 || len(d.FrontendVIPs) > 1 {
		return nil
	}
	m := d.PortMappings[0]
	f := Frontend{Port: m.ExternalPort, Protocol: protocols[m.Protocol], Family: tracker.IPv4}
	if d.Flags&loadBalancerIPv6 != 0 {
		f.Family = tracker.IPv6
	}
	if len(d.FrontendVIPs) == 1 && d.FrontendVIPs[0] != "" {
		vip, err := netip.ParseAddr(d.FrontendVIPs[0])
		if err != nil {
			return nil
		}
		f.VIP = vip.Unmap()
	}
	if f.Protocol != "" {
		lb.Frontend, lb.InternalPort, lb.Flags = f, m.InternalPort, PortFlags(m.Flags)
		lb.ClientAffinity = m.DistributionType == distributionSourceIP
	}
	return nil
}
