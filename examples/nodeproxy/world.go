package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"

	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// world is the way of objects to the ruleset: what any agent built on the library
// has, whatever it programs.
type world struct {
	opts    options
	log     *slog.Logger
	tracker *tracker.Tracker
	engine  *ruleset.Engine

	// own returns the node's addresses where no Node object tells them.
	own func() ([]netip.Addr, error)
	// node is this node's object, nil if there is none.
	node *v1.Node
	// cidrs is the ranges of cluster IPs, by ServiceCIDR object.
	cidrs map[string][]netip.Prefix
}

// newWorld makes a world of what the manifests hold at first.
func newWorld(opts options, first manifests.Changes, own func() ([]netip.Addr, error), log *slog.Logger) (*world, error) {
	w := &world{opts: opts, log: log, own: own, cidrs: map[string][]netip.Prefix{}}
	// How pod traffic is recognised must be known from the start.
	for _, o := range first.Set {
		if n, ok := o.Value.(*v1.Node); ok && n.Name == opts.hostname {
			w.node = n
		}
	}
	local, err := w.localTraffic()
	if err != nil {
		return nil, err
	}
	if w.node == nil {
		log.Info("no Node object of this name in the manifests", "node", opts.hostname)
	}
	w.tracker, err = tracker.New(tracker.Config{Node: w.nodeInfo(), Log: log})
	if err != nil {
		return nil, err
	}
	w.engine, err = ruleset.NewEngine(ruleset.Config{
		Tracker:           w.tracker,
		MasqueradeAll:     opts.masqueradeAll,
		LocalTraffic:      local,
		NodePortAddresses: opts.nodePorts,
		Log:               log,
	})
	if err != nil {
		return nil, err
	}
	if err := w.feed(first); err != nil {
		return nil, err
	}
	w.tracker.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
	return w, nil
}

// feed hands in what is different in the manifests, and logs what was skipped.
func (w *world) feed(c manifests.Changes) error {
	for _, p := range c.Problems {
		if errors.Is(p, manifests.ErrNotUsed) {
			w.log.Info("skipped", "object", p)
		} else {
			w.log.Warn("skipped", "error", p)
		}
	}
	var node *v1.Node
	for _, o := range c.Set {
		switch o := o.Value.(type) {
		case *v1.Service:
			w.tracker.SetService(o)
		case *discovery.EndpointSlice:
			w.tracker.SetSlice(o)
		case *v1.Node:
			if o.Name == w.opts.hostname {
				node = o
			}
		case *networking.ServiceCIDR:
			w.cidrs[o.Name] = w.prefixes(o)
		}
	}
	for _, ref := range c.Gone {
		switch ref.Kind {
		case manifests.Service:
			w.tracker.DeleteService(ref.NamespacedName)
		case manifests.EndpointSlice:
			w.tracker.DeleteSlice(ref.NamespacedName)
		case manifests.Node:
			if ref.Name == w.opts.hostname {
				w.node = nil
			}
		case manifests.ServiceCIDR:
			delete(w.cidrs, ref.Name)
		}
	}
	var cidrs []netip.Prefix
	for _, c := range w.cidrs {
		cidrs = append(cidrs, c...)
	}
	w.engine.SetServiceCIDRs(cidrs)
	if node != nil {
		if w.opts.local == nil && w.node != nil && !slices.Equal(podCIDRs(w.node), podCIDRs(node)) {
			return errors.New("the node's podCIDRs have changed; start again")
		}
		w.node = node
	}
	w.tracker.SetNode(w.nodeInfo())
	return nil
}

// prefixes returns the ranges of a ServiceCIDR.
func (w *world) prefixes(o *networking.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range o.Spec.CIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			w.log.Warn("skipped", "serviceCIDR", o.Name, "error", err)
			continue
		}
		out = append(out, p)
	}
	return out
}

// localTraffic says how pod traffic is recognised.
func (w *world) localTraffic() (ruleset.LocalTraffic, error) {
	if w.opts.local != nil {
		if w.opts.localMode == clusterCIDR && len(w.opts.local.CIDRs) == 0 {
			w.log.Info("no --cluster-cidr: traffic of pods is not told from other traffic, and traffic to cluster IPs is not masqueraded")
		}
		return *w.opts.local, nil
	}
	if w.node == nil {
		return ruleset.LocalTraffic{}, fmt.Errorf("--detect-local-mode %s needs a Node object named %q in the manifests", nodeCIDR, w.opts.hostname)
	}
	var cidrs []netip.Prefix
	for _, s := range podCIDRs(w.node) {
		c, err := netip.ParsePrefix(s)
		if err != nil {
			return ruleset.LocalTraffic{}, fmt.Errorf("podCIDRs of Node %s: %w", w.node.Name, err)
		}
		cidrs = append(cidrs, c.Masked())
	}
	if len(cidrs) == 0 {
		return ruleset.LocalTraffic{}, fmt.Errorf("--detect-local-mode %s, but Node %s has no podCIDRs", nodeCIDR, w.node.Name)
	}
	return ruleset.LocalTraffic{CIDRs: cidrs}, nil
}

func podCIDRs(n *v1.Node) []string {
	if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "" {
		return []string{n.Spec.PodCIDR}
	}
	return n.Spec.PodCIDRs
}

// nodeInfo returns what is known of the node.
func (w *world) nodeInfo() tracker.NodeInfo {
	info := tracker.NodeInfo{Name: w.opts.hostname}
	if w.node != nil {
		info.Zone = w.node.Labels[v1.LabelTopologyZone]
		info.Addresses = nodeAddresses(w.node)
	}
	if len(info.Addresses) == 0 {
		own, err := w.own()
		if err != nil {
			w.log.Warn("the node's addresses are not known", "error", err)
		}
		info.Addresses = own
	}
	return info
}

// nodeAddresses returns a Node's address in each family, an internal one if it
// has one.
func nodeAddresses(n *v1.Node) []netip.Addr {
	var out []netip.Addr
	for _, typ := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for _, a := range n.Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if a.Type != typ || err != nil {
				continue
			}
			family := tracker.FamilyOf(ip)
			if !slices.ContainsFunc(out, func(o netip.Addr) bool { return tracker.FamilyOf(o) == family }) {
				out = append(out, ip.Unmap())
			}
		}
	}
	return out
}
