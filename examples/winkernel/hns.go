package winkernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// HNS is the part of Windows' Host Networking Service, version 2, that a Backend uses. [Open]
// returns the service of this machine, and package fakehns has one in memory. Each method
// that writes is one call of the service. A Backend calls one method at a time.
//
// Errors wrap one of the sentinels of this package where one fits.
type HNS interface {
	// Features returns what the service supports.
	Features() (Features, error)
	// Network returns the network with the given name. Without one, the error wraps
	// ErrNoNetwork.
	Network(name string) (Network, error)
	// Endpoints returns the endpoints of all networks.
	Endpoints() ([]Endpoint, error)
	// LoadBalancers returns all load balancers.
	LoadBalancers() ([]LoadBalancer, error)
	// CreateEndpoint creates an endpoint in the network e.Network, ignores e.ID, and returns
	// the endpoint with its ID.
	CreateEndpoint(e Endpoint) (Endpoint, error)
	// DeleteEndpoint deletes an endpoint by its ID.
	DeleteEndpoint(id string) error
	// CreateLoadBalancer creates a load balancer, ignores lb.ID, and returns the load balancer
	// with its ID.
	CreateLoadBalancer(lb LoadBalancer) (LoadBalancer, error)
	// ModifyLoadBalancer replaces the settings of the load balancer lb.ID in place and returns
	// the settings that the service then has. A service that cannot do this returns
	// ErrNotImplemented.
	ModifyLoadBalancer(lb LoadBalancer) (LoadBalancer, error)
	// DeleteLoadBalancer deletes a load balancer by its ID.
	DeleteLoadBalancer(id string) error
}

var (
	// ErrNotRunning means that the service does not run or stopped during the call. It keeps its objects across a
	// restart.
	ErrNotRunning = errors.New("host networking service is not running")
	// ErrNotFound means that the network, endpoint or load balancer does not exist.
	ErrNotFound = errors.New("not found")
	// ErrNoNetwork means that the network does not exist. It wraps ErrNotFound.
	ErrNoNetwork = fmt.Errorf("network %w", ErrNotFound)
	// ErrInvalidAddr means that the service refuses an address.
	ErrInvalidAddr = errors.New("invalid address")
	// ErrExists means that another object has the address or the port.
	ErrExists = errors.New("already exists")
	// ErrNotImplemented means that this version of Windows does not support the call.
	ErrNotImplemented = errors.New("this version of Windows lacks the call")
)

// Code is an error with the number that Windows returns, an HRESULT. It wraps the
// matching error of this package, if any.
type Code uint32

// codes holds the errors by HRESULT, or by error number of Win32 (winerror.h).
var codes = map[Code]error{
	0x6b5:      ErrNotRunning,     // RPC_S_UNKNOWN_IF
	0x6ba:      ErrNotRunning,     // RPC_S_SERVER_UNAVAILABLE
	0x490:      ErrNotFound,       // ERROR_NOT_FOUND
	0xb7:       ErrExists,         // ERROR_ALREADY_EXISTS
	0x803b0001: ErrNoNetwork,      // HCN_E_NETWORK_NOT_FOUND
	0x803b0002: ErrNotFound,       // HCN_E_ENDPOINT_NOT_FOUND
	0x803b0013: ErrExists,         // HCN_E_PORT_ALREADY_EXISTS
	0x803b001e: ErrInvalidAddr,    // HCN_E_INVALID_IP
	0x803b002f: ErrExists,         // HCN_E_ADDR_INVALID_OR_RESERVED
	0x80004001: ErrNotImplemented, // E_NOTIMPL
}

// Error returns the number.
func (c Code) Error() string { return fmt.Sprintf("HRESULT %#x", uint32(c)) }

// Unwrap returns an error of this package, or nil.
func (c Code) Unwrap() error {
	if c>>16 == 0x8007 { // FACILITY_WIN32
		c &= 0xffff
	}
	return codes[c]
}

// Features is what only some versions of the service support.
type Features struct {
	// DSR is direct server return: HNS 9.3 and 10.2.
	DSR bool
	// Overlay is support for overlay networks: 9.2.
	Overlay bool
	// DualStack is support for IPv6 load balancers: 11.10.
	DualStack bool
}

// NetworkType is the kind of a network.
type NetworkType string

// The kinds of network that a Backend supports.
const (
	// L2Bridge is a network whose pods have addresses that the nodes' network routes.
	L2Bridge NetworkType = "L2Bridge"
	// Overlay is a network whose packets to other nodes are encapsulated (VXLAN).
	Overlay NetworkType = "Overlay"
)

// Network is a network of the service: the one that the node's network plugin made for pods.
type Network struct {
	// ID is the network's GUID.
	ID string
	// Name is the name by which the network is configured.
	Name string
	// Type is the kind of the network, in the spelling of the constants.
	Type NetworkType
	// RemoteSubnets lists the pod ranges of other nodes in an overlay, by prefix.
	RemoteSubnets []RemoteSubnet
}

// RemoteSubnet is the pod range of another node in an overlay.
type RemoteSubnet struct {
	// Prefix is the range, masked.
	Prefix netip.Prefix
	// Provider is the address of the node that has the range.
	Provider netip.Addr
}

// provider returns the address of the node that has the pod or node address a, or false if
// the network does not tell.
func (n *Network) provider(a netip.Addr) (netip.Addr, bool) {
	for _, s := range n.RemoteSubnets {
		if s.Prefix.Contains(a) {
			return s.Provider, true
		}
	}
	return a, n.isNode(a)
}

// isNode reports whether a is the address of another node.
func (n *Network) isNode(a netip.Addr) bool {
	return slices.ContainsFunc(n.RemoteSubnets, func(s RemoteSubnet) bool { return s.Provider == a })
}

// Endpoint is an address that load balancers can send to. The network plugin makes one for
// each pod of the node. A Backend makes remote ones for pods of other nodes.
type Endpoint struct {
	// ID is the endpoint's GUID.
	ID string
	// Network is the ID of the endpoint's network.
	Network string
	// Name is the name that the maker of the endpoint gave it; it may be "".
	Name string
	// Addrs holds one address, or one of each family.
	Addrs []netip.Addr
	// MAC is the endpoint's hardware address, in lower case with "-" between the bytes.
	MAC string
	// Remote reports whether the address is not this node's.
	Remote bool
	// Provider is, in an overlay, the address of the node that has the endpoint; the zero
	// Addr means none.
	Provider netip.Addr
}

// Frontend identifies a load balancer. The service refuses a second one that is equal.
type Frontend struct {
	// VIP is the address, or the zero Addr for a node port: all addresses of the node.
	VIP netip.Addr
	// Port is the port that clients connect to.
	Port uint16
	// Protocol is TCP, UDP or SCTP.
	Protocol v1.Protocol
	// Family is the address family. It distinguishes node ports.
	Family tracker.Family
}

// String returns the frontend for messages, such as "TCP 10.96.0.10:80" and "TCP node port
// 30080 IPv6".
func (f Frontend) String() string {
	if f.VIP.IsValid() {
		return fmt.Sprintf("%s %v", f.Protocol, netip.AddrPortFrom(f.VIP, f.Port))
	}
	return fmt.Sprintf("%s node port %d %v", f.Protocol, f.Port, f.Family)
}

// PortFlags is a set of properties of a load balancer's port
// (HCN_LOAD_BALANCER_PORT_MAPPING_FLAGS).
type PortFlags uint32

// The flags that Services need. The service has another one, ILB = 1.
const (
	// LocalRoutedVIP lets the host itself connect.
	LocalRoutedVIP PortFlags = 2
	// UseMux means that a multiplexer in front of the node chose the node.
	UseMux PortFlags = 4
	// PreserveDIP keeps the destination of packets: pods see the VIP.
	PreserveDIP PortFlags = 8
	// VIPExternalIP means that clients outside the cluster use the address.
	VIPExternalIP PortFlags = 16
)

// LoadBalancer forwards the connections to one Frontend.
type LoadBalancer struct {
	// ID is the load balancer's GUID.
	ID string
	// Frontend is the address and port that clients connect to. The zero value means that
	// the load balancer is incomplete, without a port, or of another kind.
	Frontend Frontend
	// InternalPort is the port of all endpoints.
	InternalPort uint16
	// Endpoints holds the IDs of the endpoints, sorted.
	Endpoints []string
	// DSR means direct server return: replies do not pass through the load balancer.
	DSR bool
	// Flags holds the port's properties.
	Flags PortFlags
	// ClientAffinity keeps a client at its endpoint (distribution SourceIP). The service has
	// no timeout for it.
	ClientAffinity bool
	// SourceVIP is, in an overlay, the source address towards remote endpoints; the zero Addr
	// means none.
	SourceVIP netip.Addr
	// Purpose is the kind of frontend. HNS does not store it, so it is "" for a load balancer that an
	// earlier process left.
	Purpose Purpose
}

// Purpose is a kind of frontend of a load balancer, in the words of kube-proxy's metrics.
type Purpose string

// The purposes.
const (
	ClusterIP   Purpose = "clusterip"
	NodePort    Purpose = "nodeport"
	ExternalIP  Purpose = "externalip"
	IngressIP   Purpose = "ingressip"
	HealthCheck Purpose = "healthcheck"
)

// equal reports whether the service does the same with two load balancers, whatever their IDs.
func (lb *LoadBalancer) equal(o *LoadBalancer) bool {
	return lb.Frontend == o.Frontend && lb.InternalPort == o.InternalPort && slices.Equal(lb.Endpoints, o.Endpoints) &&
		lb.DSR == o.DSR && lb.Flags == o.Flags && lb.ClientAffinity == o.ClientAffinity && lb.SourceVIP == o.SourceVIP
}
