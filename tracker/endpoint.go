package tracker

import (
	"net/netip"
	"slices"
)

// Endpoint is one address and port behind a Service port. It is made by the
// trackers; tests and hooks may make their own. Once published it is never
// changed: it may be kept and read from any goroutine, and must not be written
// to. An endpoint that an update leaves as it was keeps its pointer, so that
// pointers may be compared first and [Endpoint.Equal] asked only when they
// differ.
type Endpoint struct {
	// Addr is the address (the first of the EndpointSlice's) and port packets are
	// sent to.
	Addr netip.AddrPort
	// Node is the node the endpoint runs on, "" if not known.
	Node string
	// Zone is the zone the endpoint is in, "" if not known.
	Zone string
	// ForNodes and ForZones are the EndpointSlice's hints: the nodes and zones
	// whose traffic this endpoint should serve (KEP-3015, KEP-2433). Nil means no
	// hint. They are shared between endpoints.
	ForNodes, ForZones []string
	// Ready, Serving and Terminating are the EndpointSlice's conditions, with what
	// an unset one stands for: true, true and false.
	Ready, Serving, Terminating bool
	// Weight is the endpoint's share of new connections relative to the other
	// endpoints: 1 unless a hook says otherwise. 0 takes no new connections, while
	// those it has live on.
	Weight uint16
	// Ext is the caller's own data, from [Config.OnEndpoint], or nil.
	Ext Extension
}

// IsLocal reports whether the endpoint is known to run on the named node.
func (e *Endpoint) IsLocal(node string) bool { return node != "" && e.Node == node }

// Equal reports whether e and o say the same. Either may be nil.
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
