package winkernel

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
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
	// Log receives repairs and omissions; nil discards them.
	Log *slog.Logger
}

// Hooks has functions that a Backend calls within Apply. A nil function is not called.
type Hooks struct {
	// WriteFailed is called with "create", "modify" or "delete", and the service's error, after it refused to
	// write the load balancer. A refusal that the Backend handles by another write does not
	// count.
	WriteFailed func(write string, lb LoadBalancer, err error)
	// LeftOut is called with the addresses, sorted, of pods that the load balancers of a Service
	// leave out, because they are in the host network of this node. It is called with each line
	// about them in Config.Log: once while the addresses stay the same, and at a bounded rate.
	LeftOut func(tracker.Key, []netip.Addr)
}

// failed calls Trace.WriteFailed, and returns err with what failed.
func (c *Config) failed(w string, lb LoadBalancer, err error) error {
	if c.Trace != nil && c.Trace.WriteFailed != nil {
		c.Trace.WriteFailed(w, lb, err)
	}
	return fmt.Errorf("cannot %s load balancer %v: %w", w, lb.Frontend, err)
}

// withDefaults returns c with defaults for fields that are not set. Its error wraps
// [ruleset.ErrConfig] or is ctx's.
func (c Config) withDefaults(ctx context.Context) (Config, error) {
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
	c.NodeIPs, c.HostMAC = slices.Clone(c.NodeIPs), normalizeMAC(c.HostMAC)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, ctx.Err()
}

// forNetwork returns an error if the configuration does not suit the network.
func (c *Config) forNetwork(n *Network) error {
	need := ""
	switch {
	case n.Type == L2Bridge:
	case n.Type != Overlay:
		need = fmt.Sprintf("type %s or %s", L2Bridge, Overlay)
	case !c.SourceVIP.Is4():
		need = "an IPv4 SourceVIP"
	case c.HostMAC == "":
		need = "HostMAC"
	case len(c.NodeIPs) != 1 || !c.NodeIPs[0].Is4():
		need = "one IPv4 node IP"
	}
	if need != "" {
		return fmt.Errorf("winkernel: %w: network %q of type %s needs %s", ruleset.ErrConfig, n.Name, n.Type, need)
	}
	return nil
}

func (c *Config) serves(f tracker.Family) bool {
	return slices.ContainsFunc(c.NodeIPs, func(a netip.Addr) bool { return tracker.FamilyOf(a) == f })
}

// PreserveDestination is an annotation of a Service. The value "true" sends connections to
// node ports and load-balancer IPs to pods of this node only, which see the load-balancer IP
// as the destination. The name is kube-proxy's on Windows.
const PreserveDestination = "preserve-destination"

// preserve is the extension of a Service port with the annotation.
type preserve struct{}

func (preserve) Equal(o tracker.Extension) bool {
	_, ok := o.(preserve)
	return ok
}

// OnService reads PreserveDestination. It is for [tracker.Config.OnService]; a caller with a
// hook of its own calls it from there, after setting Ext. OnService sets Ext for a Service
// with the annotation, unless Ext is set already. It is safe for concurrent use and never
// fails.
func OnService(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	if s.Annotations[PreserveDestination] == "true" && p.Ext == nil {
		p.Ext, p.NeedLocalSet = preserve{}, true
	}
	return nil
}

// Probe checks whether the service supports the configuration. Errors about the configuration
// wrap [ruleset.ErrConfig]. A missing feature is a *[dataplane.UnsupportedError]. If the
// network does not exist yet, the error wraps [ErrNotFound], and if the service does not run,
// [ErrNotRunning]; both may change. Probe writes nothing.
func Probe(ctx context.Context, c Config) error {
	b, err := New(ctx, c)
	if err != nil {
		return err
	}
	return b.Close()
}

func (c *Config) probe() error {
	n, err := c.readNetwork()
	if err != nil {
		return err
	}
	if err := c.forNetwork(&n); err != nil {
		return err
	}
	has, err := c.HNS.Features()
	if err != nil {
		return fmt.Errorf("winkernel: cannot read what the service supports: %w", err)
	}
	for _, need := range []struct {
		feature string
		family  tracker.Family
		lacks   bool
		minimum string
	}{
		{"overlay networks", 0, n.Type == Overlay && !has.Overlay, "HNS 9.2"},
		{"direct server return", 0, c.DSR && !has.DSR, "HNS 9.3"},
		{"IPv6", tracker.IPv6, c.serves(tracker.IPv6) && !has.DualStack, "HNS 11.10"},
	} {
		if need.lacks {
			return &dataplane.UnsupportedError{Backend: "winkernel", Family: need.family, Feature: need.feature, Minimum: need.minimum}
		}
	}
	return nil
}
