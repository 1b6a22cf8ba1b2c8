package tracker

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// Config is what a [Tracker], a [ServiceChangeTracker] or an
// [EndpointsChangeTracker] is made from. Its zero value is kube-proxy's behaviour
// on a node without a name, which has no local endpoints.
//
// Hooks, Filter, Log and Events are called with the tracker's lock held: they
// must not call the tracker, and are never called concurrently by one tracker.
type Config struct {
	// Node is the node as far as it is known at the start; the
	// zero value is a node of which nothing is known. Only [Tracker] uses it.
	Node NodeInfo
	// Families is which address families to track. Nil means both.
	Families []Family
	// Selector says which Services are tracked. The zero value is kube-proxy's.
	Selector Selector
	// IgnoreExternalIPs makes the tracker treat every Service as if its
	// spec.externalIPs were empty, as kube-proxy does when its feature gate
	// AllowServiceExternalIPs is off (KEP-5707).
	IgnoreExternalIPs bool
	// Topology is what endpoints will be selected by; the zero value is
	// kube-proxy's. Only [Tracker] uses it, to
	// tell which Services a change of the node affects.
	Topology TopologyOptions
	// OnService, if not nil, is called for each ServicePort that is built, before
	// it is published, and may change any of its fields but Key. The objects are
	// the caller's own: a hook must not change or keep them, nor keep the
	// ServicePort. An error leaves that port out in that family, and is logged and
	// reported. Only [Tracker] and [ServiceChangeTracker] use it.
	OnService func(*v1.Service, *v1.ServicePort, *ServicePort) error
	// OnEndpoint, if not nil, is the same for each endpoint, once for each port of the slice,
	// and may change any field of the Endpoint but Addr. Only [Tracker] and
	// [EndpointsChangeTracker] use it.
	OnEndpoint func(*discovery.EndpointSlice, *discovery.Endpoint, *Endpoint) error
	// Log is told of what is skipped. Nil discards.
	Log *slog.Logger
	// Events is told of it too. Nil drops.
	Events EventSink
	// Now is the clock, used only to tell which trigger times lie before the
	// tracker was made. Nil means [time.Now].
	Now func() time.Time
}

// ErrConfig is what every error about a [Config] is.
var ErrConfig = errors.New("tracker: invalid config")

// complete checks c and fills in its defaults.
func (c Config) complete() (Config, error) {
	if c.Families == nil {
		c.Families = []Family{IPv4, IPv6}
	} else {
		c.Families = slices.Clone(c.Families)
		slices.Sort(c.Families)
		c.Families = slices.Compact(c.Families)
		if len(c.Families) == 0 {
			return c, fmt.Errorf("%w: Families is empty", ErrConfig)
		}
		for _, f := range c.Families {
			if f.Bits() == 0 {
				return c, fmt.Errorf("%w: unknown family %d", ErrConfig, f)
			}
		}
	}
	if err := c.Selector.validate(); err != nil {
		return c, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c, nil
}
