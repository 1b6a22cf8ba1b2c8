package winkernel

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Config configures a [Backend]. HNS, Network, Node and NodeIPs are required.
type Config struct {
	// HNS is the service to program.
	HNS HNS
	// Network is the name of the network that has the pods' endpoints (kube-proxy's
	// winkernel.networkName, or the environment variable KUBE_NETWORK).
	Network string
	// Node is the name of the node. Endpoints with this name are local.
	Node string
	// NodeIPs holds the node's address of each family. A family without one is not
	// programmed. An overlay has IPv4 only.
	NodeIPs []netip.Addr
	// DSR makes load balancers of cluster IPs use direct server return (kube-proxy's
	// winkernel.enableDSR). Frontends that have local endpoints only always use it.
	DSR bool
	// HostMAC is the hardware address of the node's adapter, which only an overlay needs.
	HostMAC string
	// SourceVIP is the source address of connections to remote endpoints (kube-proxy's
	// winkernel.sourceVip). Only an overlay needs it.
	SourceVIP netip.Addr
	// ForwardHealthCheckVIP forwards health checks of load-balancer IPs to the node
	// (kube-proxy's winkernel.forwardHealthCheckVip), through the endpoint with the name
	// RootEndpoint (winkernel.rootHnsEndpointName) to HealthCheckNodePort, or HealthzPort for
	// Services without one.
	ForwardHealthCheckVIP bool
	RootEndpoint          string
	HealthzPort           uint16
	// Hooks has functions to call; nil means none.
	Trace *Hooks
	// Log receives what the Backend repairs and leaves out; nil discards it.
	Log *slog.Logger
}

// Hooks has functions that a Backend calls within Apply. A nil function is not called.
type Hooks struct {
	// WriteFailed is called with the service's error after it refused to create, modify or
	// delete the load balancer. A refusal that the Backend handles by another write does not
	// count.
	WriteFailed func(Write, LoadBalancer, error)
	// LeftOut is called with the addresses, sorted, of pods that the load balancers of a Service
	// leave out, because they are in the host network of this node. It is called with each line
	// about them in Config.Log: once while the addresses stay the same, and at a bounded rate.
	LeftOut func(tracker.Key, []netip.Addr)
}

// Write is a call that changes a load balancer.
type Write string

// The writes.
const (
	Create Write = "create"
	Modify Write = "modify"
	Delete Write = "delete"
)

// failed calls Trace.WriteFailed, and returns err with what failed.
func (c *Config) failed(w Write, lb LoadBalancer, err error) error {
	if c.Trace != nil && c.Trace.WriteFailed != nil {
		c.Trace.WriteFailed(w, lb, err)
	}
	return fmt.Errorf("cannot %s load balancer %v: %w", w, lb.Frontend, err)
}

// withDefaults returns c with defaults for fields that are not set. Its error wraps
// [ruleset.ErrConfig].
func (c Config) withDefaults() (Config, error) {
	invalid := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("winkernel: %w: "+format, append([]any{ruleset.ErrConfig}, args...)...)
	}
	switch {
	case c.HNS == nil:
		return invalid("HNS is required")
	case c.Network == "":
		return invalid("Network is required")
	case c.Node == "":
		return invalid("Node is required")
	case len(c.NodeIPs) == 0:
		return invalid("NodeIPs is required")
	case c.ForwardHealthCheckVIP && c.RootEndpoint == "":
		return invalid("ForwardHealthCheckVIP needs RootEndpoint")
	}
	for i, a := range c.NodeIPs {
		if !a.IsValid() || a.Is4In6() {
			return invalid("node IP %q is not an IPv4 or IPv6 address", a)
		}
		for _, o := range c.NodeIPs[:i] {
			if o.Is4() == a.Is4() {
				return invalid("node IPs %v and %v are of one family", o, a)
			}
		}
	}
	c.NodeIPs = slices.Clone(c.NodeIPs)
	c.HostMAC = normalizeMAC(c.HostMAC)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// forNetwork returns an error if the configuration does not suit the network.
func (c *Config) forNetwork(n *Network) error {
	switch n.Type {
	case L2Bridge:
		return nil
	case Overlay:
	default:
		return fmt.Errorf("winkernel: %w: network %q is of type %q, not %s or %s", ruleset.ErrConfig, n.Name, n.Type, L2Bridge, Overlay)
	}
	switch {
	case !c.SourceVIP.Is4():
		return fmt.Errorf("winkernel: %w: overlay network %q needs an IPv4 SourceVIP", ruleset.ErrConfig, n.Name)
	case c.HostMAC == "":
		return fmt.Errorf("winkernel: %w: overlay network %q needs HostMAC", ruleset.ErrConfig, n.Name)
	case len(c.NodeIPs) != 1 || !c.NodeIPs[0].Is4():
		return fmt.Errorf("winkernel: %w: overlay network %q needs one IPv4 node IP", ruleset.ErrConfig, n.Name)
	}
	return nil
}

// nodeIP returns the node's address of a family.
func (c *Config) nodeIP(f tracker.Family) (netip.Addr, bool) {
	for _, a := range c.NodeIPs {
		if a.Is4() == (f == tracker.IPv4) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

func itoa(port uint16) string { return strconv.Itoa(int(port)) }
