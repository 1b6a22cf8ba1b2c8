package config

import (
	"fmt"
	"maps"
	"slices"
)

// gates is what is known of kube-proxy's feature gates: what the agent does in any
// case. A gate may be given if it asks for that.
var gates = func() map[string]bool {
	m := map[string]bool{
		// Needs rules for connections to the loopback interface that no mode but
		// iptables has.
		"KubeProxyNFTablesLocalhostNodePorts": false,
	}
	for _, always := range []string{
		"EndpointSlice", "EndpointSliceProxying", "IPv6DualStack", "SCTPSupport",
		"KubeProxyDrainingTerminatingNodes", "LoadBalancerIPMode",
		"MixedProtocolLBService", "MultiCIDRServiceAllocator", "NFTablesProxyMode",
		"PreferSameTrafficDistribution", "ProxyTerminatingEndpoints",
		"ServiceInternalTrafficPolicy", "ServiceTopologyAwareHints", "ServiceTrafficDistribution",
		"SupportIPVSProxyMode", "TopologyAwareHints", "MinimizeIPTablesRestore",
	} {
		m[always] = true
	}
	return m
}

// indifferent is gates that make no difference to anything the agent does.
var indifferent = []string{"AllAlpha", "AllBeta", "ContextualLogging", "LoggingAlphaOptions", "LoggingBetaOptions",
	"ComponentFlagz", "ComponentStatusz", "ComponentSLIs", "InformerResourceVersion", "WatchListClient", "ClientsAllowCBOR", "ClientsPreferCBOR",
	"CloudDualStackNodeIPs", "AllowServiceLBStatusOnNonLB"}

// checkGates returns notes about feature gates, and an error about one that asks
// for something the agent does not do.
func checkGates(given map[string]bool) (notes []string, err error) {
	known := gates()
	for _, name := range slices.Sorted(maps.Keys(given)) {
		does, ok := known[name]
		switch {
		case slices.Contains(indifferent, name):
			notes = append(notes, fmt.Sprintf("feature gate %s makes no difference here", name))
		case !ok:
			return nil, fmt.Errorf("feature gate %s is not known", name)
		case does != given[name]:
			return nil, fmt.Errorf("feature gate %s=%v is not supported: here it is always %v", name, given[name], does)
		default:
			notes = append(notes, fmt.Sprintf("feature gate %s is always %v here", name, does))
		}
	}
	return notes, nil
}
