// Package objects reads Services, EndpointSlices and the Node from an API server or from files,
// and turns them into a ruleset.
package objects

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/apiretry"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// World turns objects into the ruleset. Any agent that is built on the library has such a
// part, whatever it programs.
type World struct {
	Config  *config.Config
	Log     *slog.Logger
	Tracker *tracker.Tracker
	Engine  *ruleset.Engine
	WorldHooks

	// handing is held while objects are handed in that must be synced together.
	handing sync.Mutex

	mu sync.Mutex
	// node is this node's object, or nil. gone is set after its deletion was logged.
	node *v1.Node
	gone bool
	// own holds the last result of Own.
	own []netip.Addr
	// cidrs are the ranges of cluster IPs, by the name of the ServiceCIDR object.
	cidrs map[string][]netip.Prefix
	// ranges holds the last result of Ranges, and reported the overlaps that were reported.
	ranges   Ranges
	reported map[overlap]bool

	// kept is what a world with Keep stores. It may be locked with the tracker's lock held.
	kept struct {
		sync.Mutex
		objects  map[objectName]*keptObject
		problems []*manifests.Problem
	}
}

// objectName names a Service or EndpointSlice.
type objectName struct {
	kind string
	types.NamespacedName
}

// keptObject is a Service or EndpointSlice, and what was left out of it.
type keptObject struct {
	metav1.Object
	left []tracker.LeftOut
}

// WorldHooks are the functions that a world calls. All but Failed may be nil.
type WorldHooks struct {
	// Own returns the node's addresses if neither a flag nor a Node object has them.
	Own func() ([]netip.Addr, error)
	// OwnInUse is called after Own was needed, with Own's error: what it returns may change at any
	// time.
	OwnInUse func(error)
	// Ranges returns the addresses to which the node's network leads.
	Ranges func() (Ranges, error)
	// Overlap is called with a message for people about a Service CIDR that overlaps addresses in use.
	Overlap func(message string)
	// OnService adds to a Service port what the mode reads from annotations of its own.
	OnService func(*v1.Service, *tracker.ServicePort)
	// Events receives what is wrong with objects.
	Events tracker.EventSink
	// ReceiveService and ReceiveSlice, of which both or none is nil, count a Service or EndpointSlice that
	// is received, or its deletion. They call update, which hands it in and reports whether that made a
	// difference. addressType is "" for a slice that is deleted.
	ReceiveService func(name types.NamespacedName, update func() (changed bool))
	ReceiveSlice   func(addressType string, update func() (changed bool))
	// APIServer holds the addresses that no external IP may take.
	APIServer apiAddresses
	// Contact is called each time that the API server has answered about a resource.
	Contact func(resource string)
	// NotRead is called each time that a request about a resource fails, or has no answer yet.
	NotRead func(resource string, err error)
	// Ineligible is called with why the node may not get load-balancer traffic, or with "" if it
	// may.
	Ineligible func(reason string)
	// OverBudget counts a Service port that exceeds the budget.
	OverBudget func(tracker.Key)
	// Node is called with each version of this node's object.
	Node func(*v1.Node)
	// LeftOut is the OnLeftOut function of the tracker. It is also called with what the engine leaves
	// out.
	LeftOut func(v1.ObjectReference, []tracker.LeftOut)
	// Keep stores the objects for KeptServices and KeptSlices, and what is wrong with objects for
	// LeftOut and Problems, which is then not logged.
	Keep bool
	// HandedIn is called after each change of the manifests.
	HandedIn func()
	// Failed is called with an error that requires a restart of the agent.
	Failed func(error)
	// Panicked, if not nil, is called with a panic on another package's goroutine that hands in objects.
	Panicked func(any)
}

// New returns a world without Services. The Node may be nil. An error of Own is an error of New,
// because rules without the node's addresses would end its NodePorts.
func New(cfg *config.Config, families []tracker.Family, node *v1.Node, hooks WorldHooks, log *slog.Logger) (*World, error) {
	if hooks.ReceiveService == nil {
		hooks.ReceiveService = func(_ types.NamespacedName, update func() bool) { update() }
		hooks.ReceiveSlice = func(_ string, update func() bool) { update() }
	}
	if hooks.Ineligible == nil {
		hooks.Ineligible = func(string) {}
	}
	w := &World{Config: cfg, Log: log, WorldHooks: hooks, node: node, cidrs: map[string][]netip.Prefix{}, reported: map[overlap]bool{}}
	leftOut, objectLog := hooks.LeftOut, log
	if hooks.Keep {
		leftOut, objectLog = w.keepLeftOut, slog.New(slog.DiscardHandler)
		w.kept.objects = map[objectName]*keptObject{}
	}
	// How pod traffic is recognized must be known from the start.
	local, err := w.localTraffic()
	if err != nil {
		return nil, err
	}
	how, err := annotations.NewReader(cfg.Annotations)
	if err != nil {
		return nil, err
	}
	info, err := w.nodeInfo()
	if err != nil {
		return nil, err
	}
	w.Tracker, err = tracker.New(tracker.Config{
		Node: info, Families: families, Log: objectLog, Events: hooks.Events, OnLeftOut: leftOut,
		OnService: func(s *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
			warning := hooks.APIServer.onService(p)
			if err := how.OnService(s, port, p); err != nil {
				return err
			}
			if hooks.OnService != nil {
				hooks.OnService(s, p)
			}
			return warning
		},
		OnEndpoint:        how.OnEndpoint,
		IgnoreExternalIPs: !cfg.Gates.Enabled(config.AllowServiceExternalIPs),
	})
	if err != nil {
		return nil, err
	}
	w.Engine, err = ruleset.NewEngine(ruleset.Config{
		Source:            whole{w.Tracker, &w.handing, hooks.LeftOut},
		MasqueradeAll:     cfg.MasqueradeAll,
		LocalTraffic:      local,
		NodePortAddresses: cfg.NodePorts,
		Budget:            cfg.Budget,
		OverBudget:        hooks.OverBudget,
		Log:               objectLog,
	})
	return w, err
}

// together calls feed, which hands in objects that must be synced together.
func (w *World) together(feed func()) {
	w.handing.Lock()
	feed()
	w.handing.Unlock()
	if w.HandedIn != nil {
		w.HandedIn()
	}
}

// whole is a tracker whose changes are not taken while objects are handed in that belong together.
type whole struct {
	*tracker.Tracker
	handing *sync.Mutex
	leftOut func(v1.ObjectReference, []tracker.LeftOut)
}

// Event counts what the engine leaves out, each time that it reports it.
func (w whole) Event(service types.NamespacedName, warning bool, reason tracker.Reason, message string) {
	if w.leftOut != nil {
		w.leftOut(v1.ObjectReference{Kind: kindService, Namespace: service.Namespace, Name: service.Name}, []tracker.LeftOut{{Reason: reason, Err: errors.New(message)}})
	}
	w.Tracker.Event(service, warning, reason, message)
}

// Take returns no updates while objects are handed in. It does not wait, because handing in may need
// the engine's lock. A sync follows.
func (w whole) Take() tracker.Changes {
	if !w.handing.TryLock() {
		return tracker.Changes{Node: w.Node()}
	}
	defer w.handing.Unlock()
	return w.Tracker.Take()
}

// SetService hands in a Service.
func (w *World) SetService(s *v1.Service) {
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	w.keep(kindService, name, s)
	w.ReceiveService(name, func() bool { return w.Tracker.SetService(s) })
}

// DeleteService takes a Service away.
func (w *World) DeleteService(n types.NamespacedName) {
	w.keep(kindService, n, nil)
	w.ReceiveService(n, func() bool { return w.Tracker.DeleteService(n) })
}

// SetSlice hands in an EndpointSlice.
func (w *World) SetSlice(s *discovery.EndpointSlice) {
	w.keep(kindEndpointSlice, types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s)
	w.ReceiveSlice(string(s.AddressType), func() bool { return w.Tracker.SetSlice(s) })
}

// DeleteSlice takes an EndpointSlice away.
func (w *World) DeleteSlice(n types.NamespacedName) {
	w.keep(kindEndpointSlice, n, nil)
	w.ReceiveSlice("", func() bool { return w.Tracker.DeleteSlice(n) })
}

// The kinds of objects of which parts are left out.
const (
	kindService       = "Service"
	kindEndpointSlice = "EndpointSlice"
)

// keep stores an object, or nil for one that is gone, if objects are stored.
func (w *World) keep(kind string, name types.NamespacedName, o metav1.Object) {
	if !w.Keep {
		return
	}
	w.kept.Lock()
	defer w.kept.Unlock()
	if o == nil {
		delete(w.kept.objects, objectName{kind, name})
	} else {
		w.kept.objects[objectName{kind, name}] = &keptObject{Object: o}
	}
}

// keepLeftOut is the OnLeftOut function of the tracker if objects are stored.
func (w *World) keepLeftOut(o v1.ObjectReference, left []tracker.LeftOut) {
	w.kept.Lock()
	defer w.kept.Unlock()
	if k := w.kept.objects[objectName{o.Kind, types.NamespacedName{Namespace: o.Namespace, Name: o.Name}}]; k != nil {
		k.left = left
	}
}

// LeftOut returns what is left out of an object of the kind Service or EndpointSlice. The caller must not change it.
func (w *World) LeftOut(kind string, n types.NamespacedName) []tracker.LeftOut {
	w.kept.Lock()
	defer w.kept.Unlock()
	if k := w.kept.objects[objectName{kind, n}]; k != nil {
		return k.left
	}
	return nil
}

// keepProblems stores problems with manifests, if objects are stored, and reports whether they are.
func (w *World) keepProblems(all ...*manifests.Problem) bool {
	if w.Keep {
		w.kept.Lock()
		defer w.kept.Unlock()
		w.kept.problems = append(w.kept.problems, all...)
	}
	return w.Keep
}

// Problems returns the problems with the manifests. The caller must not change them.
func (w *World) Problems() []*manifests.Problem {
	w.kept.Lock()
	defer w.kept.Unlock()
	return w.kept.problems
}

// KeptServices returns the Services, sorted by name. The caller must not change them.
func (w *World) KeptServices() []*v1.Service {
	return keptOf(w, func(*v1.Service) bool { return true })
}

// KeptSlices returns the EndpointSlices of a Service, or all of them for the zero name, sorted by
// name. The caller must not change them.
func (w *World) KeptSlices(service types.NamespacedName) []*discovery.EndpointSlice {
	return keptOf(w, func(s *discovery.EndpointSlice) bool {
		return service.Name == "" || s.Namespace == service.Namespace && s.Labels[discovery.LabelServiceName] == service.Name
	})
}

// keptOf returns the stored objects of a type for which is returns true, sorted by name.
func keptOf[T metav1.Object](w *World, is func(T) bool) (out []T) {
	w.kept.Lock()
	defer w.kept.Unlock()
	for _, k := range w.kept.objects {
		if o, ok := k.Object.(T); ok && is(o) {
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b T) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
	return out
}

// KeptService returns a Service, or nil.
func (w *World) KeptService(n types.NamespacedName) *v1.Service {
	for _, s := range keptOf(w, func(s *v1.Service) bool { return s.Namespace == n.Namespace && s.Name == n.Name }) {
		return s
	}
	return nil
}

// SetNode hands in this node's object. It calls failed if the agent cannot follow a change.
func (w *World) SetNode(n *v1.Node) {
	if n.Name != w.Config.NodeName {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.Config.Effective.DetectLocalMode == config.NodeCIDR && w.node != nil && !slices.Equal(podCIDRs(w.node), podCIDRs(n)) {
		w.Failed(errors.New("the node's podCIDRs changed: restart needed"))
		return
	}
	w.node, w.gone = n, false
	w.Ineligible(health.WhyIneligible(n))
	w.trackNode()
	w.setServiceCIDRs()
	if w.WorldHooks.Node != nil {
		w.WorldHooks.Node(n)
	}
}

// DeleteNode is for a Node object that was deleted. Its last state stays in effect, because the node still carries its
// pods' traffic, and the node is not eligible for load-balancer traffic.
func (w *World) DeleteNode() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Ineligible("the Node object was deleted")
	if !w.gone {
		w.Log.Warn("the Node object was deleted; its last state stays in effect", "node", w.Config.NodeName)
	}
	w.gone = true
}

// discardNode makes the node one that never had an object.
func (w *World) discardNode() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Ineligible("")
	w.node = nil
	w.trackNode()
}

// RefreshNode reads the node's own addresses again if neither a flag nor a Node has them.
func (w *World) RefreshNode() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trackNode()
}

// SetServiceCIDR hands in ranges of cluster IPs.
func (w *World) SetServiceCIDR(o *networking.ServiceCIDR) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cidrs[o.Name] = apiretry.Ranges(o, w.Log)
	w.setServiceCIDRs()
}

// DeleteServiceCIDR takes ranges of cluster IPs away.
func (w *World) DeleteServiceCIDR(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.cidrs, name)
	w.setServiceCIDRs()
}

// localTraffic returns how pod traffic is recognized.
func (w *World) localTraffic() (ruleset.LocalTraffic, error) {
	mode := w.Config.Effective.DetectLocalMode
	if mode != config.NodeCIDR {
		if mode == config.ClusterCIDR && len(w.Config.DetectLocal.CIDRs) == 0 && w.Config.Mode != config.ModeKernelspace {
			w.Log.Info("no --cluster-cidr: traffic of pods is not recognized, and traffic to cluster IPs is not masqueraded")
		}
		return w.Config.DetectLocal, nil
	}
	if w.node == nil {
		return ruleset.LocalTraffic{}, fmt.Errorf("--detect-local-mode %s needs a Node object named %q", mode, w.Config.NodeName)
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

// NodeInfo returns the node information of the configuration and of a Node object, which may be nil.
func NodeInfo(cfg *config.Config, n *v1.Node) tracker.NodeInfo {
	info := tracker.NodeInfo{Name: cfg.NodeName}
	bind := cfg.BindAddress
	if bind.IsValid() {
		info.Addresses = append(info.Addresses, bind)
	}
	if n != nil {
		node := tracker.NodeInfoOf(n)
		info.Zone = node.Zone
		for _, a := range node.Addresses {
			if !bind.IsValid() || tracker.FamilyOf(a) != tracker.FamilyOf(bind) {
				info.Addresses = append(info.Addresses, a)
			}
		}
	}
	return info
}

// nodeInfo returns the node information. The address in each family is --bind-address, or
// else the address of the Node object. If neither has any, the addresses come from the
// routing table. If that cannot be read, they are those that were read last, with an error.
func (w *World) nodeInfo() (info tracker.NodeInfo, err error) {
	info = NodeInfo(w.Config, w.node)
	if len(info.Addresses) == 0 && w.Own != nil {
		own, failed := w.Own()
		if err = failed; err == nil {
			w.own = own
		}
		info.Addresses = w.own
		if w.OwnInUse != nil {
			w.OwnInUse(err)
		}
	}
	return info, err
}

// trackNode hands the node information to the tracker.
func (w *World) trackNode() {
	info, err := w.nodeInfo()
	if err != nil {
		w.Log.Warn("cannot read the node's addresses; what was read last stays in effect", "error", err)
	}
	w.Tracker.SetNode(info)
}
