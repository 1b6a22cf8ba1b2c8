package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// fault is the fault of a simPlane's backend.
type fault string

// simPlane is a data plane of two tables, written entry by entry.
type simPlane struct {
	env SimEnv
	// owners: the key of a frontend contains its Service.
	owners bool
	fault  fault

	fronts map[simAddr]map[tracker.Key]simEntry // by address and owner
	pools  map[simPool][]*tracker.Endpoint
	// endpoints holds the endpoints that are there, and references the number of pools that
	// refer to each.
	endpoints  map[simEndpoint]bool
	references map[simEndpoint]int
	nodes      *ruleset.Node
	writes     int
}

// simEndpoint is the key of an endpoint that pools share.
type simEndpoint struct {
	at    netip.AddrPort
	proto v1.Protocol
}

// lacks reports whether the fault is a key of a table without the part.
func (p *simPlane) lacks(table, part string) bool {
	return string(p.fault) == "has no "+part+" in the keys of "+table
}

// address returns the key of a frontend.
func (p *simPlane) address(at simAddr) simAddr {
	if p.lacks("frontends", "protocol") {
		at.proto = ""
	}
	if p.lacks("frontends", "port") {
		at.port = 0
	}
	if p.lacks("frontends", "family") {
		at.f = 0
	}
	return at
}

// setPool writes a pool. It counts the references to endpoints by their whole key, and deletes
// by the key of the table.
func (p *simPlane) setPool(at simPool, eps []*tracker.Endpoint) {
	table := func(e simEndpoint) simEndpoint {
		if p.lacks("endpoints", "protocol") {
			e.proto = ""
		}
		return e
	}
	key := func(ep *tracker.Endpoint) simEndpoint { return simEndpoint{ep.Addr, at.service.Protocol} }
	for _, ep := range eps {
		p.references[key(ep)]++
		p.endpoints[table(key(ep))] = true
	}
	for _, ep := range p.pools[at] {
		if p.references[key(ep)]--; p.references[key(ep)] == 0 {
			delete(p.endpoints, table(key(ep)))
		}
	}
	p.pools[at] = eps
}

func (p *simPlane) deletePool(at simPool) {
	p.setPool(at, nil)
	delete(p.pools, at)
}

// hasEndpoint reports whether the endpoint of a pool is there.
func (p *simPlane) hasEndpoint(at simPool, ep *tracker.Endpoint) bool {
	e := simEndpoint{ep.Addr, at.service.Protocol}
	if p.lacks("endpoints", "protocol") {
		e.proto = ""
	}
	return p.endpoints[e]
}

type simAddr struct {
	addr  netip.Addr
	port  uint16
	proto v1.Protocol
	f     tracker.Family
}

type simFront struct {
	simAddr
	owner tracker.Key
}

type simEntry struct {
	service  tracker.Key
	pools    simPool // .service is the name of the pools
	frontend ruleset.Frontend
	affinity time.Duration
	hash     tracker.Hash
	// since orders entries: of several for one address the oldest is used.
	since int
}

type simPool struct {
	service tracker.Key
	id      uint32 // replaces service, for a faulty backend
	target  ruleset.Target
}

// simPlanes returns the New function of a Simulation.
func simPlanes(owners bool, fault fault) func(testing.TB, SimEnv) Fake {
	return func(_ testing.TB, env SimEnv) Fake {
		p := &simPlane{env: env, owners: owners, fault: fault, fronts: map[simAddr]map[tracker.Key]simEntry{}, pools: map[simPool][]*tracker.Endpoint{}, endpoints: map[simEndpoint]bool{}, references: map[simEndpoint]int{}}
		return Fake{
			Backend: func() ruleset.Backend { return ruleset.BackendFunc(p.apply) },
			Handle:  p.handle,
			Dump:    p.dump,
		}
	}
}

func (p *simPlane) write(f func()) error {
	if err := p.env.Fail(); err != nil {
		if p.fault == "ignores errors" {
			return nil
		}
		return err
	}
	p.writes++
	f()
	p.env.Look()
	return nil
}

func (p *simPlane) front(k tracker.Key, f *ruleset.Frontend) simFront {
	out := simFront{p.address(simAddr{f.Addr, f.Port, k.Protocol, k.Family}), k}
	if !p.owners {
		out.owner = tracker.Key{}
	}
	return out
}

func (p *simPlane) pool(s *ruleset.Port, k tracker.Key, t ruleset.Target) simPool {
	if p.fault == "names pools by ID" && s != nil {
		return simPool{tracker.Key{}, s.ID, t}
	}
	switch {
	case p.lacks("pools", "protocol"):
		k.Protocol = ""
	case p.lacks("pools", "port"):
		k.Port = ""
	case p.lacks("pools", "family"):
		k.Family = 0
	case p.lacks("pools", "target"):
		t = 0
	}
	return simPool{k, 0, t}
}

var simTargets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// apply performs the numbered steps of package ruleset, except for its fault.
func (p *simPlane) apply(_ context.Context, d *ruleset.Delta) error {
	failed := map[tracker.Key]error{}
	step := func(f func(c *ruleset.Change) error) {
		for i := range d.Changes {
			c := &d.Changes[i]
			if failed[c.Key] == nil {
				if err := f(c); err != nil {
					failed[c.Key] = err
				}
			}
		}
	}
	p.nodes = d.Node
	step(func(c *ruleset.Change) error {
		for f := range c.GoneFrontends() {
			if err := p.write(func() { p.remove(p.front(c.Key, &f)) }); err != nil {
				return err
			}
		}
		return nil
	})
	fill := func(all bool) func(c *ruleset.Change) error {
		return func(c *ruleset.Change) error {
			for i, t := range simTargets {
				bit := []ruleset.Field{ruleset.FieldCluster, ruleset.FieldLocal}[i]
				if c.New == nil || c.Fields&bit == 0 && !d.Full || len(c.New.Pool(t)) == 0 && !all {
					continue
				}
				if err := p.write(func() { p.setPool(p.pool(c.New, c.Key, t), c.New.Pool(t)) }); err != nil {
					return err
				}
			}
			return nil
		}
	}
	if p.fault == "empties pools first" {
		step(fill(true))
	}
	if p.fault != "writes frontends before pools" {
		step(fill(false))
	}
	bits := ruleset.FieldFrontends | ruleset.FieldAffinity | ruleset.FieldHash
	if p.fault == "ignores affinity that changes" {
		bits &^= ruleset.FieldAffinity
	}
	step(func(c *ruleset.Change) error {
		if c.New == nil || c.Fields&bits == 0 && !d.Full {
			return nil
		}
		for i := range c.New.Frontends {
			f := &c.New.Frontends[i]
			at := p.front(c.Key, f)
			e := simEntry{c.Key, p.pool(c.New, c.Key, 0), *f, c.New.Spec.Affinity, c.New.Spec.Hash, p.writes}
			if was, ok := p.fronts[at.simAddr][at.owner]; ok {
				e.since = was.since
				if p.fault == "removes entries to replace them" {
					if err := p.write(func() { p.remove(at) }); err != nil {
						return err
					}
				}
			}
			if err := p.write(func() { p.add(at, e) }); err != nil {
				return err
			}
		}
		return nil
	})
	if p.fault == "writes frontends before pools" {
		step(fill(false))
	}
	if d.Full && len(failed) == 0 && p.fault != "leaves what an earlier process wrote" {
		// They may refer to pools that are emptied next.
		if err := p.prune(d); err != nil {
			return err
		}
	}
	step(func(c *ruleset.Change) error {
		if d.Full && len(failed) != 0 {
			return nil
		}
		for _, to := range c.LostFrontends() {
			if failed[to] != nil {
				return nil
			}
		}
		if p.owners && p.fault != "ignores frontends that move" || p.fault == "deletes frontends that move" {
			for f := range c.LostFrontends() {
				if err := p.write(func() { p.remove(p.front(c.Key, &f)) }); err != nil {
					return err
				}
			}
		}
		if err := fill(true)(c); err != nil || c.New != nil {
			return err
		}
		for _, t := range simTargets {
			if err := p.write(func() { p.deletePool(p.pool(c.Old, c.Key, t)) }); err != nil {
				return err
			}
		}
		return nil
	})
	if len(failed) != 0 {
		if d.Full {
			return errors.Join(slices.Collect(maps.Values(failed))...)
		}
		// It has no record of what it wrote.
		return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, errors.Join(slices.Collect(maps.Values(failed))...))
	}
	if d.Full && p.fault != "leaves what an earlier process wrote" {
		return p.prunePools(d)
	}
	return nil
}

func (p *simPlane) add(f simFront, e simEntry) {
	if p.fronts[f.simAddr] == nil {
		p.fronts[f.simAddr] = map[tracker.Key]simEntry{}
	}
	p.fronts[f.simAddr][f.owner] = e
}

func (p *simPlane) remove(f simFront) {
	delete(p.fronts[f.simAddr], f.owner)
	if len(p.fronts[f.simAddr]) == 0 {
		delete(p.fronts, f.simAddr)
	}
}

func (p *simPlane) prune(d *ruleset.Delta) error {
	fronts := map[simFront]bool{}
	for _, c := range d.Changes {
		if c.New == nil {
			continue
		}
		for i := range c.New.Frontends {
			fronts[p.front(c.Key, &c.New.Frontends[i])] = true
		}
	}
	for at, entries := range p.fronts {
		for owner := range entries {
			if f := (simFront{at, owner}); !fronts[f] {
				if err := p.write(func() { p.remove(f) }); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (p *simPlane) prunePools(d *ruleset.Delta) error {
	pools := map[simPool]bool{}
	for _, c := range d.Changes {
		for _, t := range simTargets {
			if c.New != nil {
				pools[p.pool(c.New, c.Key, t)] = true
			}
		}
	}
	for k := range p.pools {
		if !pools[k] && p.fault != "leaves pools" {
			if err := p.write(func() { p.deletePool(k) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// find returns the entry for an address.
func (p *simPlane) find(addr netip.Addr, pk ruleset.Packet) (e simEntry, ok bool) {
	return p.first(p.address(simAddr{addr, pk.To.Port(), pk.Protocol, tracker.FamilyOf(pk.To.Addr())}))
}

// first returns the oldest entry with a key.
func (p *simPlane) first(at simAddr) (e simEntry, ok bool) {
	for _, x := range p.fronts[at] {
		if !ok || x.since < e.since {
			e, ok = x, true
		}
	}
	return e, ok
}

// clusterIP reports whether an address is a cluster IP.
func (p *simPlane) clusterIP(a netip.Addr) bool {
	for at, entries := range p.fronts {
		if at.addr != a {
			continue
		}
		for _, e := range entries {
			if e.frontend.Kind == ruleset.KindClusterIP {
				return true
			}
		}
	}
	return false
}

func (p *simPlane) handle(pk ruleset.Packet) Outcome {
	if p.nodes == nil {
		return Outcome{}
	}
	toNode, f := slices.Contains(pk.NodeAddresses, pk.To.Addr()), tracker.FamilyOf(pk.To.Addr())
	e, ok := p.find(pk.To.Addr(), pk)
	ports := p.nodes.NodePorts(f)
	if !ok && toNode && (ports.Allows(pk.To.Addr()) || pk.InInterface == "" && ports.AllowsLoopback(pk.To.Addr())) {
		e, ok = p.find(netip.Addr{}, pk)
	}
	switch {
	case ok:
	case toNode:
		return Outcome{}
	case p.clusterIP(pk.To.Addr()):
		return Outcome{Action: ruleset.ActionReject}
	case slices.ContainsFunc(p.nodes.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(pk.To.Addr()) }):
		return Outcome{Action: ruleset.ActionDrop}
	default:
		return Outcome{}
	}
	if !e.frontend.Admits(pk.From) && p.fault != "ignores source ranges" {
		return Outcome{Action: ruleset.ActionDrop}
	}
	fromPod, fromNode := p.nodes.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	t := e.frontend.TargetFor(fromPod || fromNode)
	switch t {
	case ruleset.TargetReject:
		return Outcome{Action: ruleset.ActionReject}
	case ruleset.TargetDrop:
		return Outcome{Action: ruleset.ActionDrop}
	}
	masquerade := e.frontend.Masquerade.Applies(fromPod, fromNode)
	out := Outcome{Action: ruleset.ActionForward, Affinity: e.affinity, Hash: e.hash}
	if e.affinity != 0 {
		out.Hash = e.hash
	}
	at := e.pools
	if at.target = t; p.lacks("pools", "target") {
		at.target = 0
	}
	for _, ep := range p.pools[at] {
		if !p.hasEndpoint(at, ep) {
			out.Endpoints = append(out.Endpoints, Choice{})
			continue
		}
		out.Endpoints = append(out.Endpoints, Choice{ep.Addr, int(ep.Weight), masquerade || ep.Addr.Addr() == pk.From && p.fault != "has no hairpin"})
	}
	return out
}

func (p *simPlane) dump() string {
	var lines []string
	for k, entries := range p.fronts {
		for _, e := range entries {
			lines = append(lines, fmt.Sprintln(k, e.service, e.frontend, e.affinity, e.hash))
		}
	}
	for k, eps := range p.pools {
		lines = append(lines, fmt.Sprintln(k, eps))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
