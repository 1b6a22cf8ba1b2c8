package informers

import (
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/tracker"
)

func (c Config) setService(s *v1.Service) {
	c.ReceiveService(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, func() bool { return c.Tracker.SetService(s) })
}

func (c Config) deleteService(name types.NamespacedName) {
	c.ReceiveService(name, func() bool { return c.Tracker.DeleteService(name) })
}

func (c Config) setSlice(s *discovery.EndpointSlice) {
	c.ReceiveSlice(string(s.AddressType), func() bool { return c.Tracker.SetSlice(s) })
}

func (c Config) deleteSlice(name types.NamespacedName) {
	c.ReceiveSlice("", func() bool { return c.Tracker.DeleteSlice(name) })
}

// passNode passes on a Node, or with nil that it is deleted.
func (c Config) passNode(name string, n *v1.Node) {
	if c.Node != "" {
		info := tracker.NodeInfo{Name: name}
		switch {
		case c.NodeInfo != nil:
			info = c.NodeInfo(n)
		case n != nil:
			info = tracker.NodeInfoOf(n)
		}
		c.Tracker.SetNode(info)
	}
	if c.OnNode != nil {
		c.OnNode(name, n)
	}
}

// serviceCIDRs returns the source of ServiceCIDRs, whose ranges it passes to the Engine together. The
// tracker does not wait for it, because the API server may not have any.
func (c Config) serviceCIDRs() apiretry.Source[*networking.ServiceCIDR] {
	ranges := map[string][]netip.Prefix{}
	pass := func() { c.Engine.SetServiceCIDRs(slices.Concat(slices.Collect(maps.Values(ranges))...), nil) }
	return apiretry.Source[*networking.ServiceCIDR]{
		Resource: "servicecidrs", Absent: func() {}, Synced: func() {},
		Set:  func(o *networking.ServiceCIDR) { ranges[o.Name] = apiretry.Ranges(o, c.Log); pass() },
		Gone: func(n types.NamespacedName) { delete(ranges, n.Name); pass() },
	}
}
