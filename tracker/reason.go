package tracker

import "github.com/go-proxier/proxier/endpointslice"

// LeftOut names a Service, an EndpointSlice, or a part of one, that the tracker leaves out, and the reason: see
// [Config.OnLeftOut].
type LeftOut = endpointslice.LeftOut

// Reason is why a Service, an EndpointSlice, or a part of one is left out, in logs, Events and metrics of the tracker
// and package ruleset. Its text is a word in CamelCase and does not change.
type Reason = endpointslice.Reason

// The reasons for which a whole Service or EndpointSlice is left out. The fields in
// parentheses are those that a reason comes from.
const (
	// ReasonExternalName: the Service is a name in the DNS (spec.type).
	ReasonExternalName Reason = "ProxyExternalName"
	// ReasonHeadless: the Service has no cluster IP on purpose (spec.clusterIP None).
	ReasonHeadless Reason = "ProxyHeadless"
	// ReasonHeadlessLabel: the Service or slice has the label service.kubernetes.io/headless
	// (metadata.labels).
	ReasonHeadlessLabel Reason = "ProxyHeadlessLabel"
	// ReasonOtherProxy: the Service is for another proxy (metadata.labels,
	// service.kubernetes.io/service-proxy-name, and [Selector].ProxyNames).
	ReasonOtherProxy Reason = "ProxyOtherProxy"
	// ReasonFiltered: [Selector].Filter returned false for the Service.
	ReasonFiltered Reason = "ProxyFiltered"
	// ReasonNoClusterIP: the Service has no cluster IP yet (spec.clusterIP).
	ReasonNoClusterIP Reason = "ProxyNoClusterIP"
	// ReasonNoPorts: the Service has no ports (spec.ports).
	ReasonNoPorts Reason = "ProxyNoPorts"
	// ReasonAddressType: the slice's addresses are no IP addresses (addressType).
	ReasonAddressType Reason = endpointslice.ReasonAddressType
	// ReasonNoService: no label names the Service of the slice.
	ReasonNoService Reason = endpointslice.ReasonNoService
)

// The reasons for which a part of a Service or EndpointSlice is left out. For some of them the
// whole object may be left out.
const (
	// ReasonInvalid: a field has a value that the API does not allow. It counts as unset.
	// An object that is nil or has no name is left out.
	ReasonInvalid Reason = endpointslice.ReasonInvalid
	// ReasonPortNumber: the number of a port is out of range (spec.ports[].port and nodePort,
	// spec.healthCheckNodePort; ports[].port of a slice).
	ReasonPortNumber Reason = endpointslice.ReasonPortNumber
	// ReasonNoPortNumber: a port of a slice has no number, which means all ports
	// (ports[].port). A Service cannot use it.
	ReasonNoPortNumber Reason = endpointslice.ReasonNoPortNumber
	// ReasonPortName: a port of a slice has no name (ports[].name); "" is a name.
	ReasonPortName Reason = endpointslice.ReasonPortName
	// ReasonProtocol: the protocol of a port is not TCP, UDP or SCTP (spec.ports[].protocol;
	// ports[].protocol of a slice).
	ReasonProtocol Reason = endpointslice.ReasonProtocol
	// ReasonDuplicate: a port repeats the name or number of an earlier one (spec.ports), a
	// cluster IP is the second of its family (spec.clusterIPs), or an endpoint repeats the
	// address of another (endpoints[].addresses).
	ReasonDuplicate Reason = endpointslice.ReasonDuplicate
	// ReasonAddress: an address is missing, is no IP address, or is not that of one host
	// that others can reach (spec.clusterIPs, spec.externalIPs,
	// status.loadBalancer.ingress[].ip; endpoints[].addresses of a slice).
	ReasonAddress Reason = endpointslice.ReasonAddress
	// ReasonReserved: no Service may have the address: 169.254.169.254, where clouds serve the
	// metadata of a machine, as an external or load-balancer IP.
	ReasonReserved Reason = "ProxyReservedAddress"
	// ReasonFamily: the tracker, or the Service, does not have the address family
	// ([Config.Families], spec.clusterIPs; addressType of a slice).
	ReasonFamily Reason = "ProxyFamily"
	// ReasonFamilyMismatch: an address is not of the family that the object declares for it
	// (spec.ipFamilies; addressType of a slice).
	ReasonFamilyMismatch Reason = endpointslice.ReasonFamilyMismatch
	// ReasonFurtherAddress: an endpoint has more than one address (endpoints[].addresses).
	// The API defines a meaning for the first only.
	ReasonFurtherAddress Reason = endpointslice.ReasonFurtherAddress
	// ReasonIPMode: packets to a load-balancer IP do not arrive with that destination
	// (status.loadBalancer.ingress[].ipMode Proxy, KEP-1860).
	ReasonIPMode Reason = "ProxyIPMode"
	// ReasonHostname: a load balancer has a name and no address
	// (status.loadBalancer.ingress[].hostname).
	ReasonHostname Reason = "ProxyHostname"
	// ReasonExternalIPsOff: external IPs are not served ([Config.IgnoreExternalIPs]).
	ReasonExternalIPsOff Reason = "ProxyExternalIPsOff"
	// ReasonSourceRange: a source range is invalid (spec.loadBalancerSourceRanges).
	ReasonSourceRange Reason = "ProxySourceRange"
	// ReasonClosed: none of the Service's source ranges is usable, so its
	// load-balancer addresses accept no traffic (spec.loadBalancerSourceRanges).
	ReasonClosed Reason = "ProxySourceRangesUnusable"
	// ReasonHookFailed: a hook of [Config] rejected a port or an endpoint.
	ReasonHookFailed Reason = endpointslice.ReasonHookFailed
	// ReasonHookWarning: a hook of [Config] accepted a port or an endpoint with a
	// [Warning]. Nothing is left out.
	ReasonHookWarning Reason = "ProxyHookWarning"
	// ReasonLimitExceeded: the Service has more than 2,000 ports, 1,000 external or load-balancer IPs, 10,000
	// combinations of port and address, or 100,000 combinations of port, load-balancer IP and source range; the slice
	// has more than 20,000 combinations of port and address; or, as package ruleset reports, a Service exceeds a
	// limit of the data plane or a budget.
	ReasonLimitExceeded Reason = endpointslice.ReasonLimitExceeded
	// ReasonFrontendConflict: another Service already uses an address and port of
	// this Service. Package ruleset reports it.
	ReasonFrontendConflict Reason = "ProxyFrontendConflict"
)

// The reasons for which [Select] does not use an endpoint, which [Selection.Excludes] returns.
// They are neither logged nor reported.
const (
	// ReasonNotReady: the endpoint is not ready (conditions.ready), and not one that serves
	// while it terminates.
	ReasonNotReady Reason = "ProxyNotReady"
	// ReasonTerminating: the endpoint serves while it terminates (conditions.terminating),
	// and others are ready.
	ReasonTerminating Reason = "ProxyTerminating"
	// ReasonOtherNode: all traffic to the port has policy Local, and the endpoint is on
	// another node (nodeName, [NodeInfo].Name).
	ReasonOtherNode Reason = "ProxyOtherNode"
	// ReasonHints: the endpoint's hints name other nodes or zones (hints, [NodeInfo]).
	ReasonHints Reason = "ProxyHints"
	// ReasonWeight: a hook of [Config] set [Endpoint].Weight to 0. Package ruleset does not
	// use the endpoint.
	ReasonWeight Reason = "ProxyWeight"
)

// Excludes returns why e is missing from s.Reachable, or "" if it is there. s is the result of [Select] for p and
// node with e among the endpoints, or without those of weight 0. p and e must not be nil.
func (s *Selection) Excludes(p *ServicePort, e *Endpoint, node NodeInfo) Reason {
	for _, o := range s.Reachable {
		if o == e {
			return ""
		}
	}
	switch {
	case e.Weight == 0:
		return ReasonWeight
	case !e.Ready && !(e.Serving && e.Terminating):
		return ReasonNotReady
	case !p.UsesClusterEndpoints() && !e.IsLocal(node.Name):
		return ReasonOtherNode
	case e.Ready:
		return ReasonHints
	}
	return ReasonTerminating
}
