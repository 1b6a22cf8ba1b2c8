package tracker

import (
	"fmt"
	"log/slog"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// Config configures a [Tracker], a [ServiceChangeTracker] or an [EndpointsChangeTracker]. The zero value gives
// kube-proxy's behavior on a node without a name, which has no local endpoints.
//
// The tracker calls the hooks, Filter, Log and Events with its lock held and never concurrently. They must not call
// the tracker, which would wait forever.
type Config struct {
	// Node is the initial node information. The zero value means that nothing is
	// known yet. Only [Tracker] uses it.
	Node NodeInfo
	// Families lists the address families to track. Nil means both.
	Families []Family
	// Selector selects the Services to track. The zero value selects those that
	// kube-proxy selects.
	Selector Selector
	// IgnoreExternalIPs makes the tracker ignore spec.externalIPs, as kube-proxy does when its feature gate
	// AllowServiceExternalIPs is off (KEP-5707).
	IgnoreExternalIPs bool
	// OnService, if not nil, is called for each new ServicePort before it is published. It may change any field
	// except Key. The hook must not change or keep the API objects, and must not keep the ServicePort. If it returns
	// an error, the tracker leaves the port out in that family, and logs and reports the error. A [Warning] is logged
	// and reported, and the port is kept. Only [Tracker] and [ServiceChangeTracker] use it.
	OnService func(*v1.Service, *v1.ServicePort, *ServicePort) error
	// OnEndpoint, if not nil, is called for each endpoint, once per port of the slice, by the rules for OnService. It
	// may change any field of the Endpoint except Addr. The Service may not be known yet: see OnServiceEndpoint. Only
	// [Tracker] and [EndpointsChangeTracker] use it.
	OnEndpoint func(*discovery.EndpointSlice, *discovery.Endpoint, *Endpoint) error
	// OnServiceEndpoint, if not nil, is called by [Tracker.Take] for each endpoint together with its Service port,
	// once both are known, and after the other two hooks, which can pass on data from the API objects in Ext. It may
	// change any field of the Endpoint, a copy, except Addr; the change applies to this port only. If the hook
	// returns an error, the tracker leaves the endpoint out of this port, and logs and reports the error for the
	// Service. After a [Warning] the endpoint is kept.
	//
	// The result must depend on the arguments alone. The tracker calls the hook again for an endpoint that changed,
	// and for all endpoints of a port if the ServicePort changed. The hook must not keep or change the ServicePort,
	// and must not keep the Endpoint. Only [Tracker] uses it.
	OnServiceEndpoint func(*ServicePort, *Endpoint) error
	// Kinds lists the kinds of objects that [Tracker.MarkSynced] must be called for. Nil means all of them. A caller
	// without Node objects, for example, leaves out [KindNodes]. Only [Tracker] uses it.
	Kinds []Kind
	// Log receives a warning for each reason for which parts of an object are skipped. A value from an object is cut
	// at 100 bytes. A warning is not repeated while it stays the same. Of different warnings, the tracker writes 20
	// about the objects of one namespace and then one every 10 seconds, and 200 in all and then 2 a second; the next
	// warning has the number of suppressed ones. The same bounds hold again for warnings about EndpointSlices. Nil
	// discards the warnings.
	Log *slog.Logger
	// Events receives the same as events. Nil discards them.
	Events EventSink
	// OnLeftOut, if not nil, is called when a Service or EndpointSlice is set of which something is left out, with
	// everything that is ([LeftOut].Expected or not), up to 1,000 parts; and by [Tracker.Take] if OnServiceEndpoint
	// leaves out endpoints. An object that is set without a call has nothing left out. It may keep the list, which
	// refers to parts of the API object, and must not change it.
	OnLeftOut func(object v1.ObjectReference, left []LeftOut)
}

// complete validates c and fills in its defaults.
func (c Config) complete() (Config, error) {
	if c.Families == nil {
		c.Families = []Family{IPv4, IPv6}
	} else {
		c.Families = slices.Clone(c.Families)
		slices.Sort(c.Families)
		c.Families = slices.Compact(c.Families)
		if len(c.Families) == 0 {
			return c, fmt.Errorf("tracker: invalid config: Families is empty")
		}
		for _, f := range c.Families {
			if f.Bits() == 0 {
				return c, fmt.Errorf("tracker: invalid config: unknown family %d", f)
			}
		}
	}
	if c.Kinds == nil {
		c.Kinds = []Kind{KindServices, KindSlices, KindNodes}
	}
	if len(c.Kinds) == 0 {
		return c, fmt.Errorf("tracker: invalid config: Kinds is empty")
	}
	for _, s := range c.Kinds {
		if s > KindNodes {
			return c, fmt.Errorf("tracker: invalid config: unknown kind of objects %d", s)
		}
	}
	if err := c.Selector.validate(); err != nil {
		return c, fmt.Errorf("tracker: invalid config: %w", err)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Extension is a caller's own data on a [ServicePort] or [Endpoint], set by a hook of [Config]. Equal must return
// true exactly if the caller's backend would treat both values alike; pointers to equal values differ by ==. It must
// accept nil and values of other types, and must be safe for concurrent use. An Extension must not change after its
// hook has returned.
type Extension interface {
	Equal(Extension) bool
}

func equalExt(a, b Extension) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return a.Equal(b)
}
