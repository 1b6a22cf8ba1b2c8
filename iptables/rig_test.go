//go:build linux

package iptables

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/backendtest"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// rig is a pipeline from a tracker to one kernel, which a test drives step by step.
type rig struct {
	testing.TB
	flavour Flavour
	host    *netlab.Host
	config  Config
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
}

const thisNode = backendtest.ThisNode

func newRig(tb testing.TB, flavour Flavour, edits ...func(*Config)) *rig {
	tb.Helper()
	r := &rig{TB: tb, flavour: flavour, host: netlab.NewHost(tb)}
	r.config = testConfig(tb, flavour)
	r.config.NetNS = r.host.File()
	for _, e := range edits {
		e(&r.config)
	}
	p := backendtest.NewNode(tb, tracker.Config{})
	r.tracker, r.engine = p.Tracker, p.Engine
	r.start()
	tb.Cleanup(func() { r.backend.Close() })
	return r
}

// start attaches a new backend, as a new process would.
func (r *rig) start() {
	r.Helper()
	if r.cursor != nil {
		r.cursor.Detach()
		r.backend.Close()
	}
	var err error
	if r.backend, err = New(context.Background(), r.config); err != nil {
		r.Fatal(err)
	}
	r.cursor = r.engine.Attach("iptables", r.backend)
}

func (r *rig) sync() {
	r.Helper()
	if err := r.cursor.Sync(context.Background()); err != nil {
		r.Fatal(err)
	}
}

// command runs iptables or ip6tables of the flavour in the namespace.
func (r *rig) command(f tracker.Family, suffix string, args ...string) string {
	r.Helper()
	out, err := r.try(f, suffix, args...)
	if err != nil {
		r.Fatalf("%v: %s", err, out)
	}
	return out
}

func (r *rig) try(f tracker.Family, suffix string, args ...string) (string, error) {
	name := "iptables-"
	if f == tracker.IPv6 {
		name = "ip6tables-"
	}
	return r.host.Output("env", append([]string{"XTABLES_LOCKFILE=" + r.config.LockFile, name + string(r.flavour) + suffix}, args...)...)
}

// listing holds the rules of each chain, with keys such as "nat KUBE-SERVICES".
type listing map[string][]string

// kernel reads the tables with iptables-save, except the canaries.
func (r *rig) kernel(f tracker.Family) listing {
	r.Helper()
	return listingOf(r.command(f, "-save"))
}

// listingOf parses the output of iptables-save.
func listingOf(text string) listing {
	out := listing{}
	tab := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(line, "*"):
			tab = line[1:]
		case strings.HasPrefix(line, ":KUBE-"):
			name, _, _ := strings.Cut(line[1:], " ")
			out[tab+" "+name] = []string{}
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[3:], " ")
			rule = strings.Replace(rule, string(nfacctSaved), string(nfacctWritten), 1)
			out[tab+" "+name] = append(out[tab+" "+name], rule)
		}
	}
	for t := range tables {
		delete(out, t.String()+" "+chainCanary)
	}
	return out
}

// size counts the rules of our own chains.
func (l listing) size() (n [tables]int) {
	for name, rules := range l {
		for t := range tables {
			if strings.HasPrefix(name, t.String()+" KUBE-") {
				n[t] += len(rules)
			}
		}
	}
	return n
}

// want renders the tables from the ruleset's state.
func (r *rig) want(f tracker.Family) listing {
	r.Helper()
	snap := r.engine.Snapshot()
	i := slices.IndexFunc(r.backend.families, func(x *family) bool { return x.family == f })
	m, err := newModel(r.backend.families[i].settings, snap.Node)
	if err != nil {
		r.Fatal(err)
	}
	out := listing{}
	add := func(c chain) {
		if c.rules == nil {
			c.rules = []string{}
		}
		if _, twice := out[c.table.String()+" "+c.name]; twice {
			r.Fatalf("chain %s is rendered twice", c.name)
		}
		out[c.table.String()+" "+c.name] = c.rules
	}
	for _, s := range snap.Services {
		if s.Key.Family != f {
			continue
		}
		if err := m.set(s.ID, s, func(_, now []chain) {
			for _, c := range now {
				add(c)
			}
		}); err != nil {
			r.Fatal(err)
		}
	}
	m.allChains(add)
	for _, h := range m.hooks() {
		k := h.table.String() + " " + h.chain
		out[k] = slices.Insert(out[k], 0, h.rule)
	}
	return out
}

// verify compares the kernel with the ruleset.
func (r *rig) verify() {
	r.Helper()
	for _, f := range r.backend.families {
		got, want := r.kernel(f.family), r.want(f.family)
		if f.model == nil {
			r.Error("the backend has no model of the tables")
		} else if size := f.model.size(); size != got.size() {
			r.Errorf("%s: the model has %v rules in filter and nat, the kernel %v", f.family, size, got.size())
		}
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if !slices.Equal(got[name], want[name]) {
				r.Fatalf("%v: %s is\n\t%s\nwant\n\t%s", f.family, name, strings.Join(got[name], "\n\t"), strings.Join(want[name], "\n\t"))
			}
		}
		for name, rules := range got {
			if _, ok := want[name]; !ok {
				r.Fatalf("%v: %s is left: %v", f.family, name, rules)
			}
		}
	}
	if err := r.backend.Check(context.Background()); err != nil {
		r.Fatal(err)
	}
}

// svc returns a dual-stack Service number i with edits.
func svc(i int, edits ...func(*v1.Service)) *v1.Service {
	v4, v6 := fmt.Sprintf("10.96.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:10:96::%x", i+1)
	return backendtest.Service(backendtest.ServiceName(i), "p", v4, v6, edits...)
}

// slice returns the EndpointSlice of Service i with endpoints. Numbers divisible by three are
// on this node.
func slice(i int, f tracker.Family, endpoints ...int) *discovery.EndpointSlice {
	es := backendtest.Slice(backendtest.ServiceName(i), f.String(), f, "p", v1.ProtocolTCP)
	for _, n := range endpoints {
		a := fmt.Sprintf("10.244.%d.%d", n>>8, n&255)
		if f == tracker.IPv6 {
			a = fmt.Sprintf("fd00:10:244::%x", n+1)
		}
		node := "node-b"
		if n%3 == 0 {
			node = thisNode
		}
		es.Endpoints = append(es.Endpoints, backendtest.Endpoint(a, node))
	}
	return es
}

// set passes Service i with its endpoints to the tracker.
func (r *rig) set(i int, endpoints []int, edits ...func(*v1.Service)) {
	r.tracker.SetService(svc(i, edits...))
	r.setEndpoints(i, endpoints...)
}

func (r *rig) setEndpoints(i int, endpoints ...int) {
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r.tracker.SetSlice(slice(i, f, endpoints...))
	}
}

// podTargets is the cluster IP and the NodePort of Service 50, whose endpoints are pods of a
// world.
var podTargets = []conformance.Target{
	{Addr: netip.MustParseAddrPort("10.96.0.50:80"), Protocol: v1.ProtocolTCP},
	{Addr: netip.MustParseAddrPort("192.0.2.1:30050"), Protocol: v1.ProtocolTCP},
}

// podSlice returns the EndpointSlice of Service 50 with n of the pods.
func podSlice(pods []string, n int, rng *rand.Rand) *discovery.EndpointSlice {
	es := slice(50, tracker.IPv4)
	backendtest.AddPods(es, pods, n, rng)
	return es
}

// setPods gives Service 50 n of the world's pods as endpoints.
func setPods(w *conformance.World, n int, rng *rand.Rand) {
	w.Tracker.SetSlice(podSlice(backendtest.Pods(w), n, rng))
}

// These are the same in the tests of all backends.
var (
	upTo          = backendtest.UpTo
	nodePort      = backendtest.NodePort
	affinity      = backendtest.Affinity
	externalLocal = backendtest.ExternalLocal
	internalLocal = backendtest.InternalLocal
	overUDP       = backendtest.Over(v1.ProtocolUDP)
	externalIPs   = backendtest.ExternalIPs("198.51.100.1", "2001:db8:3::1")
)

func loadBalancer(s *v1.Service) {
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	s.Spec.Ports[0].NodePort = 30080
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8:1::1"}}
	s.Spec.LoadBalancerSourceRanges = []string{"172.16.0.0/12", "2001:db8:2::/48"}
}
