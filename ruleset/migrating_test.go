package ruleset_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// plane is the data plane of MIGRATING.md: two maps.
type plane struct {
	env       conformance.SimEnv
	node      *ruleset.Node
	frontends map[loopFrontend]loopEntry
	pools     map[driver.Pool][]*tracker.Endpoint
}

type loopFrontend struct {
	addr   netip.Addr // the zero Addr for a NodePort
	port   uint16
	proto  v1.Protocol
	family tracker.Family
}

type loopEntry struct {
	service  tracker.Key
	port     *tracker.ServicePort
	frontend ruleset.Frontend
}

func (p *plane) Apply(ctx context.Context, d *ruleset.Delta) error {
	failed := map[tracker.Key]error{}
	for i := range d.Changes { // what changed
		c := &d.Changes[i]
		if err := p.install(c); err != nil { // gone frontends, then pools, then frontends
			failed[c.Key] = err
		}
	}
	if err := p.prune(d, failed); err != nil { // what nothing asks for
		return err
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		if failed[c.Key] != nil || losesTo(c, failed) {
			continue
		}
		if err := p.uninstall(c); err != nil { // pools
			failed[c.Key] = err
		}
	}
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// losesTo reports whether a Service loses a frontend to one that failed. The frontend's
// clients still need it.
func losesTo(c *ruleset.Change, failed map[tracker.Key]error) bool {
	for _, to := range c.LostFrontends() {
		if failed[to] != nil {
			return true
		}
	}
	return false
}

// write makes a change to the maps.
func (p *plane) write(do func()) error {
	if err := p.env.Fail(); err != nil {
		return err
	}
	do()
	p.env.Look()
	return nil
}

var loopTargets = []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// install deletes the frontends that are gone and writes the pools of a Service and then its
// frontends.
func (p *plane) install(c *ruleset.Change) error {
	for f := range c.GoneFrontends() {
		if err := p.write(func() { delete(p.frontends, at(c.Key, f)) }); err != nil {
			return err
		}
	}
	if c.New == nil {
		return nil
	}
	if c.Fields&(ruleset.FieldCluster|ruleset.FieldLocal) != 0 {
		for _, t := range loopTargets {
			if pool := c.New.Pool(t); len(pool) != 0 {
				if err := p.write(func() { p.pools[driver.Pool{Service: c.Key, Target: t}] = pool }); err != nil {
					return err
				}
			}
		}
	}
	if c.Fields&(ruleset.FieldFrontends|ruleset.FieldAffinity) != 0 {
		for _, f := range c.New.Frontends {
			if err := p.write(func() { p.frontends[at(c.Key, f)] = loopEntry{c.Key, c.New.Spec, f} }); err != nil {
				return err
			}
		}
	}
	return nil
}

// uninstall deletes the pools that are gone or empty.
func (p *plane) uninstall(c *ruleset.Change) error {
	for _, t := range loopTargets {
		k := driver.Pool{Service: c.Key, Target: t}
		if _, ok := p.pools[k]; ok && (c.New == nil || len(c.New.Pool(t)) == 0) {
			if err := p.write(func() { delete(p.pools, k) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// prune deletes what no Service of a full delta asks for, and what failed attempts left.
func (p *plane) prune(d *ruleset.Delta, failed map[tracker.Key]error) error {
	changes := map[tracker.Key]*ruleset.Change{}
	for i := range d.Changes {
		changes[d.Changes[i].Key] = &d.Changes[i]
	}
	for k, e := range p.frontends {
		c := changes[e.service]
		stale := c == nil && d.Full
		if c != nil && c.Fields == ruleset.FieldAll && failed[c.Key] == nil && !losesTo(c, failed) {
			stale = c.New == nil || !slices.ContainsFunc(c.New.Frontends, func(f ruleset.Frontend) bool { return at(c.Key, f) == k })
		}
		if stale {
			if err := p.write(func() { delete(p.frontends, k) }); err != nil {
				return err
			}
		}
	}
	for k := range p.pools {
		if d.Full && changes[k.Service] == nil {
			if err := p.write(func() { delete(p.pools, k) }); err != nil {
				return err
			}
		}
	}
	return nil
}

func at(k tracker.Key, f ruleset.Frontend) loopFrontend {
	return loopFrontend{f.Addr, f.Port, k.Protocol, k.Family}
}

func (p *plane) handle(pk ruleset.Packet) conformance.Outcome {
	if p.node == nil {
		return conformance.Outcome{}
	}
	k := loopFrontend{pk.To.Addr(), pk.To.Port(), pk.Protocol, tracker.FamilyOf(pk.To.Addr())}
	e, ok := p.frontends[k]
	if !ok && slices.Contains(pk.NodeAddresses, k.addr) && p.node.NodePorts(k.family).Allows(k.addr) {
		k.addr = netip.Addr{}
		e, ok = p.frontends[k]
	}
	fromPod, fromNode := p.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	target := e.frontend.TargetFor(fromPod || fromNode)
	switch {
	case !ok:
		return conformance.Outcome{}
	case !e.frontend.Admits(pk.From), target == ruleset.TargetDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	case target == ruleset.TargetReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	}
	out := conformance.Outcome{Action: ruleset.ActionForward, Affinity: e.port.Affinity}
	for _, ep := range p.pools[driver.Pool{Service: e.service, Target: target}] {
		out.Endpoints = append(out.Endpoints, conformance.Choice{
			Addr: ep.Addr, Weight: int(ep.Weight), Masquerade: e.frontend.Masquerade.Applies(fromPod, fromNode) || ep.Addr.Addr() == pk.From,
		})
	}
	return out
}

// TestMigratingSnippet runs the code of MIGRATING.md, with failing writes and restarts.
func TestMigratingSnippet(t *testing.T) {
	conformance.Simulate(t, conformance.Simulation{
		New: func(_ testing.TB, env conformance.SimEnv) conformance.Fake {
			p := &plane{env: env, frontends: map[loopFrontend]loopEntry{}, pools: map[driver.Pool][]*tracker.Endpoint{}}
			return conformance.Fake{
				Backend: func() ruleset.Backend {
					return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
						p.node = d.Node
						return p.Apply(ctx, d)
					})
				},
				Handle: p.handle,
			}
		},
		Skip: map[conformance.Feature]string{
			conformance.LoopbackNodePorts: "no packet from a loopback address leaves the node",
			conformance.ClosedPorts:       "frontends are all there is",
			conformance.ServiceCIDRs:      "as closed ports",
			conformance.ConsistentHash:    "the plane has no hash",
		},
		Worlds: 6,
	})
}

// TestMigratingSnippetIsTheOneTested compares this file with MIGRATING.md.
func TestMigratingSnippetIsTheOneTested(t *testing.T) {
	page := must.Get(os.ReadFile("MIGRATING.md"))(t)
	file := must.Get(os.ReadFile("migrating_test.go"))(t)
	_, after, _ := strings.Cut(string(page), "```go\n")
	if code, _, ok := strings.Cut(after, "```"); !ok || !strings.Contains(string(file), code) {
		t.Errorf("this file does not contain the code of MIGRATING.md:\n%s", code)
	}
}

// TestRefusedServiceInMigratingSnippet refuses one Service of a hundred from the first delta on. The
// others are acknowledged and cost no writes again.
func TestRefusedServiceInMigratingSnippet(t *testing.T) {
	tr := must.Get(tracker.New(tracker.Config{}))(t)
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
	refused, writes := errors.New("refused"), 0
	p := &plane{frontends: map[loopFrontend]loopEntry{}, pools: map[driver.Pool][]*tracker.Endpoint{}}
	p.env = conformance.SimEnv{Fail: func() error {
		if writes++; writes == 1 {
			return refused
		}
		return nil
	}, Look: func() {}}
	c := e.Attach("plane", p)
	var info ruleset.SyncInfo
	c.OnSync(func(i ruleset.SyncInfo) { info = i })
	for i := range 100 {
		s := web.DeepCopy()
		s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = s.Name+string(rune('a'+i)), netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}).String(), nil
		s.Spec.Ports[0].NodePort = 0
		tr.SetService(s)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	if err := c.Sync(t.Context()); !errors.Is(err, refused) || info.Failed != 1 || info.Changes != 100 {
		t.Fatalf("error %v, %d of %d failed", err, info.Failed, info.Changes)
	}
	first := writes
	if writes = 0; !errors.Is(c.Sync(t.Context()), refused) || writes != 1 || info.Full {
		t.Errorf("%d writes while a Service is refused, %d at first", writes, first)
	}
	if err := c.Sync(t.Context()); err != nil || len(p.frontends) == 0 {
		t.Errorf("error %v when nothing is refused", err)
	}
}
