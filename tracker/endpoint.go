package tracker

import (
	"net/netip"
	"slices"
)

// Endpoint is one address and port of a Service port. The trackers make Endpoints;
// tests and hooks may make their own. A published Endpoint never changes: callers may
// keep it and read it from any goroutine, and must not modify it. An endpoint that an
// update does not change keeps its pointer. Callers can therefore compare pointers
// first and call [Endpoint.Equal] only if they differ.
type Endpoint struct {
	// Addr is the address and port to send packets to. The address is the first of
	// the endpoint's addresses in the EndpointSlice.
	Addr netip.AddrPort
	// Node is the name of the endpoint's node, or "" if unknown.
	Node string
	// Zone is the endpoint's zone, or "" if unknown.
	Zone string
	// ForNodes and ForZones are the EndpointSlice's hints: the nodes and zones whose
	// traffic this endpoint should serve (KEP-3015, KEP-2433). Nil means no hint.
	// Endpoints share these slices.
	ForNodes, ForZones []string
	// Ready, Serving and Terminating are the EndpointSlice's conditions. Unset
	// conditions have the API's defaults: true, true and false.
	Ready, Serving, Terminating bool
	// Weight is the endpoint's share of new connections relative to the other
	// endpoints. It is 1 unless a hook changes it. An endpoint of weight 0 gets no
	// new connections and keeps its existing ones.
	Weight uint16
	// Ext is the caller's own data, set by [Config.OnEndpoint] or
	// [Config.OnServiceEndpoint], or nil.
	Ext Extension
}

// IsLocal reports whether the endpoint is known to run on the named node.
func (e *Endpoint) IsLocal(node string) bool { return node != "" && e.Node == node }

// Equal reports whether all fields of e and o are equal. Either may be nil.
func (e *Endpoint) Equal(o *Endpoint) bool {
	if e == nil || o == nil {
		return e == o
	}
	return e == o || e.Addr == o.Addr &&
		e.Ready == o.Ready && e.Serving == o.Serving && e.Terminating == o.Terminating &&
		e.Weight == o.Weight &&
		e.Node == o.Node && e.Zone == o.Zone &&
		slices.Equal(e.ForNodes, o.ForNodes) && slices.Equal(e.ForZones, o.ForZones) &&
		equalExt(e.Ext, o.Ext)
}

// String returns "address:port", with an IPv6 address in brackets.
func (e *Endpoint) String() string { return e.Addr.String() }
