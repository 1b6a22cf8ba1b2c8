package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// world turns objects into the ruleset. Any agent that is built on the library has such a
// part, whatever it programs.
type world struct {
	cfg     *config.Config
	log     *slog.Logger
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	worldHooks

	mu sync.Mutex
	// node is this node's object, or nil.
	node *v1.Node
	// cidrs are the ranges of cluster IPs, by the name of the ServiceCIDR object.
	cidrs map[string][]netip.Prefix
}

// worldHooks are the functions that a world calls. All but failed may be nil.
type worldHooks struct {
	// own returns the node's addresses if neither a flag nor a Node object has them.
	own func() ([]netip.Addr, error)
	// ownInUse is called when the result of own is in use. It may change at any time.
	ownInUse func()
	// events receives what is wrong with objects.
	events tracker.EventSink
	// receiveService and receiveSlice count a Service or EndpointSlice that is received,
	// or its deletion. They call update, which hands it in and reports whether that made a
	// difference. addressType is "" for a slice that is deleted.
	receiveService func(name types.NamespacedName, update func() (changed bool))
	receiveSlice   func(addressType string, update func() (changed bool))
	// apiServer holds the addresses that no external IP may take.
	apiServer apiAddresses
	// eligible is called with whether the node may get load-balancer traffic.
	eligible func(bool)
	// overBudget counts a Service port that exceeds the budget.
	overBudget func(tracker.Key)
	// failed is called with an error that requires a restart of the agent.
	failed func(error)
}

// newWorld returns a world without Services. The Node may be nil.
func newWorld(cfg *config.Config, families []tracker.Family, node *v1.Node, hooks worldHooks, log *slog.Logger) (*world, error) {
	w := &world{cfg: cfg, log: log, worldHooks: hooks, node: node, cidrs: map[string][]netip.Prefix{}}
	// How pod traffic is recognised must be known from the start.
	local, err := w.localTraffic()
	if err != nil {
		return nil, err
	}
	how, err := annotations.NewReader(cfg.Annotations)
	if err != nil {
		return nil, err
	}
	w.tracker, err = tracker.New(tracker.Config{
		Node: w.nodeInfo(), Families: families, Log: log, Events: hooks.events,
		OnService: func(s *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
			warning := hooks.apiServer.onService(p)
			if err := how.OnService(s, port, p); err != nil {
				return err
			}
			return warning
		},
		OnEndpoint:        how.OnEndpoint,
		IgnoreExternalIPs: !cfg.Gates.Enabled(config.AllowServiceExternalIPs),
	})
	if err != nil {
		return nil, err
	}
	w.engine, err = ruleset.NewEngine(ruleset.Config{
		Tracker:           w.tracker,
		MasqueradeAll:     cfg.MasqueradeAll,
		LocalTraffic:      local,
		NodePortAddresses: cfg.NodePorts,
		Budget:            serviceBudget(cfg),
		OverBudget:        hooks.overBudget,
		Log:               log,
	})
	return w, err
}

// serviceBudget returns the budget for the configured mode.
func serviceBudget(cfg *config.Config) ruleset.Budget {
	b := cfg.Budget
	if cfg.Mode == config.ModeIPVS {
		b.Cost = ipvsCost
	}
	return b
}

// ipvsCost is the cost of a Service in mode ipvs, where every frontend has its own list of
// endpoints. A NodePort has one for each of the node's addresses; a node is taken to have four.
func ipvsCost(s *ruleset.Service) int {
	n := 0
	for i := range s.Frontends {
		f := &s.Frontends[i]
		servers := max(len(s.Pool(f.Target)), len(s.Pool(f.Internal)))
		times := 1
		if f.Kind == ruleset.NodePort {
			times = 4
		}
		n += times*(1+servers) + len(f.Sources)
	}
	return n
}

func (w *world) setService(s *v1.Service) {
	w.service(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, func() bool { return w.tracker.SetService(s) })
}

func (w *world) deleteService(n types.NamespacedName) {
	w.service(n, func() bool { return w.tracker.DeleteService(n) })
}

func (w *world) service(name types.NamespacedName, update func() (changed bool)) {
	if w.receiveService == nil {
		update()
		return
	}
	w.receiveService(name, update)
}

func (w *world) setSlice(s *discovery.EndpointSlice) {
	w.slice(string(s.AddressType), func() bool { return w.tracker.SetSlice(s) })
}

func (w *world) deleteSlice(n types.NamespacedName) {
	w.slice("", func() bool { return w.tracker.DeleteSlice(n) })
}

func (w *world) slice(addressType string, update func() (changed bool)) {
	if w.receiveSlice == nil {
		update()
		return
	}
	w.receiveSlice(addressType, update)
}

// setNode hands in this node's object. It calls failed if the agent cannot follow a change.
func (w *world) setNode(n *v1.Node) {
	if n.Name != w.cfg.NodeName {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cfg.Effective.DetectLocalMode == config.NodeCIDR && w.node != nil && !slices.Equal(podCIDRs(w.node), podCIDRs(n)) {
		w.failed(errors.New("the node's podCIDRs changed: restart needed"))
		return
	}
	w.node = n
	w.setEligible(health.Eligible(n))
	w.tracker.SetNode(w.nodeInfo())
}

// nodeGone handles the deletion of this node's object. If discard is not set, the last state
// of the object stays in effect, because the node still carries its pods' traffic, and the
// node is not eligible for load-balancer traffic. If discard is set, the node is as eligible
// as one that never had an object.
func (w *world) nodeGone(discard bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.setEligible(discard)
	if !discard {
		w.log.Warn("the Node object was deleted; its last state stays in effect", "node", w.cfg.NodeName)
		return
	}
	w.node = nil
	w.tracker.SetNode(w.nodeInfo())
}

func (w *world) setEligible(eligible bool) {
	if w.eligible != nil {
		w.eligible(eligible)
	}
}

// refreshNode reads the node's own addresses again if neither a flag nor a Node has them.
func (w *world) refreshNode() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tracker.SetNode(w.nodeInfo())
}

func (w *world) setServiceCIDR(o *networking.ServiceCIDR) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cidrs[o.Name] = w.prefixes(o)
	w.cidrsChanged()
}

func (w *world) deleteServiceCIDR(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.cidrs, name)
	w.cidrsChanged()
}

func (w *world) cidrsChanged() {
	var cidrs []netip.Prefix
	for _, c := range w.cidrs {
		cidrs = append(cidrs, c...)
	}
	w.engine.SetServiceCIDRs(cidrs)
}

// prefixes returns the ranges of a ServiceCIDR.
func (w *world) prefixes(o *networking.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range o.Spec.CIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			w.log.Warn("skipped a range of a ServiceCIDR", "serviceCIDR", o.Name, "error", err)
			continue
		}
		out = append(out, p)
	}
	return out
}

// localTraffic returns how pod traffic is recognised.
func (w *world) localTraffic() (ruleset.LocalTraffic, error) {
	mode := w.cfg.Effective.DetectLocalMode
	if mode != config.NodeCIDR {
		if mode == config.ClusterCIDR && len(w.cfg.DetectLocal.CIDRs) == 0 {
			w.log.Info("no --cluster-cidr: traffic of pods is not recognised, and traffic to cluster IPs is not masqueraded")
		}
		return w.cfg.DetectLocal, nil
	}
	if w.node == nil {
		return ruleset.LocalTraffic{}, fmt.Errorf("--detect-local-mode %s needs a Node object named %q", mode, w.cfg.NodeName)
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
		return ruleset.LocalTraffic{}, fmt.Errorf("--detect-local-mode %s, but Node %s has no podCIDRs", mode, w.node.Name)
	}
	return ruleset.LocalTraffic{CIDRs: cidrs}, nil
}

func podCIDRs(n *v1.Node) []string {
	if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "" {
		return []string{n.Spec.PodCIDR}
	}
	return n.Spec.PodCIDRs
}

// nodeInfo returns the node information. The address in each family is --bind-address, or
// else the address of the Node object. If neither has any, the addresses come from the
// routing table.
func (w *world) nodeInfo() tracker.NodeInfo {
	info := tracker.NodeInfo{Name: w.cfg.NodeName}
	bind := w.cfg.BindAddress
	if bind.IsValid() {
		info.Addresses = append(info.Addresses, bind)
	}
	if w.node != nil {
		node := tracker.NodeInfoOf(w.node)
		info.Zone = node.Zone
		for _, a := range node.Addresses {
			if !bind.IsValid() || tracker.FamilyOf(a) != tracker.FamilyOf(bind) {
				info.Addresses = append(info.Addresses, a)
			}
		}
	}
	if len(info.Addresses) == 0 && w.own != nil {
		own, err := w.own()
		if err != nil {
			w.log.Warn("cannot read the node's addresses", "error", err)
		}
		info.Addresses = own
		if w.ownInUse != nil {
			w.ownInUse()
		}
	}
	return info
}
