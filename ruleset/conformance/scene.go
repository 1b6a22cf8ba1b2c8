package conformance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// skips holds the features that a backend lacks, as [Options].Skip.
type skips map[Feature]string

// does reports whether the backend supports the feature.
func (s skips) does(f Feature) bool {
	_, lacks := s[f]
	return !lacks
}

// scene is the part of a [cluster] that does not depend on how packets are sent.
type scene struct {
	tb testing.TB
	skips
	config     config
	ipFamilies []tracker.Family
	pods       []string
	// services holds the services last passed to set.
	services map[string]*service
	// apply changes an object.
	apply func(worldgen.Op)
}

// newScene returns the scene of a world. It fills in the defaults of c.
func newScene(tb testing.TB, c config, families []tracker.Family, skip skips, apply func(worldgen.Op)) scene {
	c = c.complete()
	if c.localTraffic == nil {
		c.localTraffic = &ruleset.LocalTraffic{CIDRs: each(families, localPodCIDR)}
	}
	return scene{
		tb: tb, skips: skip, config: c, ipFamilies: families, pods: podNames(c.remotePods),
		services: map[string]*service{}, apply: apply,
	}
}

// complete fills in the defaults.
func (c config) complete() config {
	c.clients, c.remotePods = cmp.Or(c.clients, 4), cmp.Or(c.remotePods, defaultRemotePods)
	return c
}

// start returns a new tracker and engine. It fails the test on an error.
func (s *scene) start(n tracker.NodeInfo, cidrs []netip.Prefix) (*tracker.Tracker, *ruleset.Engine) {
	s.tb.Helper()
	t, err := tracker.New(tracker.Config{
		Node: n, Families: s.ipFamilies,
		// Annotations carry the settings without an API field.
		OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint,
	})
	if err != nil {
		s.tb.Fatal(err)
	}
	addresses, err := ruleset.ParseNodePortAddresses(s.config.nodePortAddresses)
	if err != nil {
		s.tb.Fatal(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{
		Source: t, MasqueradeAll: s.config.masqueradeAll, LocalTraffic: *s.config.localTraffic,
		NodePortAddresses: addresses, ServiceCIDRs: cidrs, HashSeed: hashSeed, Budget: ruleset.Budget{Delta: s.config.delta},
	})
	if err != nil {
		s.tb.Fatal(err)
	}
	return t, e
}

// firstNode returns the node at the start of a world.
func (s *scene) firstNode() tracker.NodeInfo {
	return tracker.NodeInfo{Name: nodeName, Zone: zone, Addresses: each(s.ipFamilies, primary)}
}

func (s *scene) set(c *service) {
	s.services[c.name] = c
	s.apply(worldgen.Op{SetService: c.object(s.ipFamilies)})
	for _, f := range s.ipFamilies {
		s.apply(worldgen.Op{SetSlice: c.slice(f)})
	}
}

func (s *scene) change(name string, edit func(*service)) {
	c := *s.services[name]
	edit(&c)
	s.set(&c)
}

func (s *scene) remove(name string) {
	delete(s.services, name)
	s.apply(worldgen.Op{DeleteService: &types.NamespacedName{Namespace: namespace, Name: name}})
	for _, f := range s.ipFamilies {
		s.apply(worldgen.Op{DeleteSlice: &types.NamespacedName{Namespace: namespace, Name: sliceName(name, f)}})
	}
}

func (s *scene) setNode(n tracker.NodeInfo) { s.apply(worldgen.Op{SetNode: &n}) }
func (s *scene) families() []tracker.Family { return s.ipFamilies }

// protocols returns TCP and, if the backend supports it, UDP.
func (s *scene) protocols() []v1.Protocol {
	if !s.does(UDP) {
		return []v1.Protocol{tcp}
	}
	return []v1.Protocol{tcp, udp}
}

// targets returns the targets in every family, over each protocol that the backend supports.
func (s *scene) targets(aims []aim) (out []Target) {
	for _, f := range s.ipFamilies {
		for _, a := range aims {
			for _, p := range a.protocols {
				if p != udp || s.does(UDP) {
					out = append(out, Target{a.to.at(f), p})
				}
			}
		}
	}
	return out
}

// lacks reports whether the backend lacks one of the features.
func (s *scene) lacks(features []Feature) bool {
	s.tb.Helper()
	i := slices.IndexFunc(features, func(f Feature) bool { return !s.does(f) })
	if i < 0 {
		return false
	}
	s.tb.Logf("not checked: the backend does not support %s: %s", features[i], s.skips[features[i]])
	return true
}

func (s *scene) errorf(format string, args ...any) {
	s.tb.Helper()
	s.tb.Errorf(format, args...)
}

// origin is a source of packets.
type origin struct {
	name string
	// in is the node's interface on which its packets arrive, "" for the node itself.
	in   string
	addr func(tracker.Family) netip.Addr
}

// origin returns the host with a name, as in [row].
func (s *scene) origin(name string) origin {
	var n int
	switch {
	case name == nodeName:
		return origin{name, "", primary}
	case name == "loopback":
		return origin{name, "", loopback}
	case strings.HasPrefix(name, "client"):
		fmt.Sscanf(name, "client%d", &n)
		return origin{name, "eth0", func(f tracker.Family) netip.Addr { return clientAddr(f, n) }}
	}
	node, addr := podNamed(name)
	switch {
	case node == remoteName:
		return origin{name, "eth1", addr}
	case s.config.bridge:
		return origin{name, bridgeName, addr}
	}
	return origin{name, interfacePrefix + name, addr}
}

// packet returns a packet from a host.
func (s *scene) packet(from origin, proto v1.Protocol, to netip.AddrPort) ruleset.Packet {
	f := tracker.FamilyOf(to.Addr())
	return ruleset.Packet{From: from.addr(f), InInterface: from.in, Protocol: proto, To: to, NodeAddresses: s.nodeAddresses(f)}
}

// nodeAddresses returns all local addresses of the node.
func (s *scene) nodeAddresses(f tracker.Family) []netip.Addr {
	out := nodeAddresses(f)
	for _, t := range s.config.bound {
		out = append(out, t.at(f).Addr())
	}
	return out
}

// podAt returns the name of the pod with the address, or "".
func (s *scene) podAt(f tracker.Family, a netip.Addr) string {
	i := slices.IndexFunc(s.pods, func(name string) bool {
		_, addr := podNamed(name)
		return addr(f) == a
	})
	if i < 0 {
		return ""
	}
	return s.pods[i]
}

// unexpected returns an error if a verdict is not the expected one, which is formatted
// like row.want.
func (s *scene) unexpected(v ruleset.Verdict, f tracker.Family, want string) error {
	if got := s.describe(v, f); got != sortWords(want) {
		return fmt.Errorf("the verdict of Trace is %q (%s), but the world expects %q: one of them is wrong", got, v.Rule, want)
	}
	return nil
}

// describe formats a verdict like row.want.
func (s *scene) describe(v ruleset.Verdict, f tracker.Family) string {
	if v.Action != ruleset.ActionForward {
		return v.Action.String()
	}
	var names []string
	for _, ep := range v.Endpoints {
		at := ep.Addr
		n := s.podAt(f, at.Addr())
		switch port := at.Port(); {
		case n == "":
			n = at.String()
		case port != podPort:
			n += fmt.Sprint(":", port)
		}
		if v.MasqueradeTo(ep) {
			n += "*"
		}
		names = append(names, n)
	}
	return sortWords(strings.Join(names, " "))
}
