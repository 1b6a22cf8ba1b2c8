package winkernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// apply is one call of Backend.Apply. It does not use a [driver.Driver], which keeps everything that a failed
// Service had. If the service refuses one load balancer, for example because another program has the port,
// the other load balancers of the Service change, and endpoints go that none of them has.
type apply struct {
	*Backend
	ctx  context.Context
	full bool
	// plans holds the load balancers of each Service that changes and stays, and addresses the
	// remote endpoints that they need.
	plans  map[tracker.Key][]wanted
	needed map[tracker.Key]map[address]bool
	// failed holds the errors of Services that fail alone, and those of Services that wait.
	failed map[tracker.Key]error
	// stale is the error of sweep and prune. Everything is then in effect, but stale objects are
	// left.
	stale error
	// uncertain is set after a write whose outcome is unknown.
	uncertain bool
	// listed and readNetwork are set once the endpoints and the network were read in this call.
	listed, readNetwork bool
}

// run brings the changes into effect. Endpoints come before the load balancers that use them
// and go after them, and a load balancer that stays is never missing. A failed write does not end
// the steps of its Service: its other load balancers follow the change. An error means that the
// rest was not done.
func (a *apply) run(changes []ruleset.Change) error {
	a.listed, a.readNetwork = a.full, a.full
	a.plans, a.needed = make(map[tracker.Key][]wanted, len(changes)), make(map[tracker.Key]map[address]bool, len(changes))
	for i := range changes {
		if err := a.claim(&changes[i]); err != nil {
			return err
		}
	}
	if a.full {
		if err := a.beginFull(); err != nil {
			return err
		}
	}
	for _, step := range []func(*ruleset.Change) error{a.write, a.release} {
		for i := range changes {
			if err := a.ctx.Err(); err != nil {
				return err
			}
			if err := a.judge(changes[i].Key, step(&changes[i])); err != nil {
				return err
			}
		}
	}
	a.stale = a.sweep()
	if a.full {
		a.stale = errors.Join(a.stale, a.prune())
	}
	return nil
}

// judge records an error of a Service. It returns errors that concern more than the Service.
func (a *apply) judge(k tracker.Key, err error) error {
	if err == nil || concernsAll(err) {
		return err
	}
	a.failed[k] = errors.Join(a.failed[k], err)
	return nil
}

// concernsAll reports whether an error of a call concerns more than one object: the service does
// not run, or the state is not as expected.
func concernsAll(err error) bool { return errors.Is(err, ErrNotRunning) || errors.Is(err, ErrNotFound) }

// wrote returns the error of a call that writes. The outcome is unknown then, unless the service
// refused to write.
func (a *apply) wrote(err error) error {
	a.uncertain = a.uncertain || !errors.Is(err, ErrExists) && !errors.Is(err, ErrInvalidAddr)
	return err
}

// claim plans a Service and records what it uses.
func (a *apply) claim(c *ruleset.Change) error {
	delete(a.waiting, c.Key)
	if c.New == nil || !a.config.serves(c.Key.Family) {
		return nil
	}
	if err := a.learnSubnets(c.New); err != nil {
		return err
	}
	p := a.planner()
	plan, needed := p.plan(c.New), map[address]bool{}
	for i := range plan {
		w := &plan[i]
		a.lbs.Claim(c.Key, w.settings.Frontend)
		if a.needsVIP(c.New, w) {
			needed[address{w.settings.Frontend.VIP, true}] = true
		}
		for _, e := range w.pool {
			if !p.local(e) {
				needed[address{e.Addr.Addr(), false}] = true
			}
		}
	}
	for item := range needed {
		a.addresses.Claim(c.Key, item)
	}
	a.plans[c.Key], a.needed[c.Key] = plan, needed
	return nil
}

// learnSubnets reads an overlay's network again if it does not know an endpoint of the Service:
// a node may have joined.
func (a *apply) learnSubnets(s *ruleset.Port) error {
	if a.readNetwork || a.state.network.Type != Overlay {
		return nil
	}
	p := a.planner()
	if !slices.ContainsFunc(s.Selection.Reachable, func(e *tracker.Endpoint) bool {
		_, known := a.state.network.provider(e.Addr.Addr())
		return !known && !p.local(e)
	}) {
		return nil
	}
	n, err := a.config.HNS.Network(a.config.Network)
	if err == nil && n.ID != a.state.network.ID {
		err = fmt.Errorf("%w: it was replaced", ErrNotFound)
	}
	if err != nil {
		a.uncertain = true
		return fmt.Errorf("winkernel: cannot read network %q: %w", a.config.Network, err)
	}
	a.state.network, a.readNetwork = n, true
	return nil
}

// needsVIP reports whether a load balancer needs an endpoint of its cluster IP.
func (a *apply) needsVIP(s *ruleset.Port, w *wanted) bool {
	return a.state.network.Type == Overlay && w.settings.Frontend.VIP == s.Spec.ClusterIP
}

// beginFull makes the source VIP of an overlay and deletes endpoints for pods that moved to
// another node.
func (a *apply) beginFull() error {
	if a.state.network.Type != Overlay {
		return nil
	}
	p := a.planner()
	if a.state.at[a.config.SourceVIP].local == "" {
		if err := a.createEndpoint(p.sourceEndpoint()); err != nil {
			return err
		}
	}
	for _, e := range a.state.endpoints {
		if !p.isRemotePod(&e) || p.remoteEndpoint(e.Addrs[0]).Provider == e.Provider {
			continue
		}
		// The service refuses a second endpoint with the address.
		if err := a.withdraw(e); err != nil {
			return err
		}
	}
	return nil
}

// withdraw deletes an endpoint that load balancers may have.
func (a *apply) withdraw(e Endpoint) error {
	for _, f := range a.state.usedBy(e.ID) {
		lb := a.state.lbs[f]
		lb.Endpoints = slices.DeleteFunc(slices.Clone(lb.Endpoints), func(id string) bool { return id == e.ID })
		err := error(nil)
		if len(lb.Endpoints) == 0 {
			err = a.deleteLoadBalancer(f)
		} else {
			err = a.change(lb)
		}
		if err != nil {
			return err
		}
	}
	return a.deleteEndpoint(e)
}

// write makes the endpoints and load balancers of a Service.
func (a *apply) write(c *ruleset.Change) error {
	var missing absent
	var errs []error
	for i := range a.plans[c.Key] {
		err := a.writeOne(c.New, &a.plans[c.Key][i], &missing)
		if concernsAll(err) {
			return err
		}
		errs = append(errs, err)
	}
	missing.sort()
	if all := slices.Concat(missing.late, missing.node); len(all) != 0 {
		a.waiting[c.Key] = all
	}
	if len(missing.node) != 0 {
		a.leaveOut(c.Key, missing.node)
	}
	if len(missing.late) != 0 {
		errs = append(errs, &WaitingError{missing.late})
	}
	return errors.Join(errs...)
}

// writeOne makes a load balancer and its endpoints.
func (a *apply) writeOne(s *ruleset.Port, w *wanted, missing *absent) error {
	if a.needsVIP(s, w) {
		if _, err := a.remote(a.planner().vipEndpoint(w.settings.Frontend.VIP)); err != nil {
			return err
		}
	}
	lb := w.settings
	var err error
	if lb.Endpoints, err = a.resolve(w, missing); err != nil {
		return err
	}
	return a.put(lb)
}

// absent holds the addresses of endpoints that the service does not have.
type absent struct {
	// late holds those that the network plugin will make, or delete.
	late []netip.Addr
	// node holds those at the node's own addresses. Network plugins do not make them.
	node []netip.Addr
}

// sort sorts the addresses and removes duplicates.
func (m *absent) sort() {
	for _, list := range []*[]netip.Addr{&m.late, &m.node} {
		slices.SortFunc(*list, netip.Addr.Compare)
		*list = slices.Compact(*list)
	}
}

// leaveOut reports that the load balancers of a Service leave out pods in the node's host network.
func (a *apply) leaveOut(k tracker.Key, addrs []netip.Addr) {
	if a.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "pods in the host network of this node are left out of load balancers: HNS has no endpoint at the node's address", "addresses", fmt.Sprint(addrs)) &&
		a.config.Trace != nil && a.config.Trace.LeftOut != nil {
		a.config.Trace.LeftOut(k, addrs)
	}
}

// resolve returns the IDs of a load balancer's endpoints. It makes those of other nodes.
func (a *apply) resolve(w *wanted, missing *absent) ([]string, error) {
	if w.root {
		if a.state.root == "" {
			return nil, nil // Check notices it
		}
		return []string{a.state.root}, nil
	}
	out := make([]string, 0, len(w.pool))
	for _, e := range w.pool {
		id, err := a.endpoint(e)
		switch {
		case err != nil:
			return nil, err
		case id != "":
			out = append(out, id)
		case slices.Contains(a.config.NodeIPs, e.Addr.Addr()):
			missing.node = append(missing.node, e.Addr.Addr())
		default:
			missing.late = append(missing.late, e.Addr.Addr())
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// endpoint returns the ID of an endpoint. It returns "" for a pod of this node whose endpoint
// the network plugin has not made, and for one of another node whose address still belongs to
// a pod here.
func (a *apply) endpoint(e *tracker.Endpoint) (string, error) {
	addr, local := e.Addr.Addr(), a.planner().local(e)
	if local && a.state.at[addr].local == "" || !local && a.state.at[addr].local != "" && e.Node != "" {
		if err := a.list(); err != nil {
			return "", err
		}
	}
	at := a.state.at[addr]
	switch {
	case local, at.local != "" && e.Node == "":
		return at.local, nil
	case at.local != "":
		return "", nil
	}
	return a.remote(a.planner().remoteEndpoint(addr))
}

// list reads the endpoints of the service, unless this call of Apply did.
func (a *apply) list() error {
	if a.listed {
		return nil
	}
	if err := a.state.readEndpoints(&a.config); err != nil {
		a.uncertain = true
		return err
	}
	a.listed = true
	return nil
}

// remote returns the ID of the remote endpoint with the address of e, and makes e if there is
// none.
func (a *apply) remote(e Endpoint) (string, error) {
	addr := e.Addrs[0]
	if id := a.state.at[addr].remote; id != "" {
		return id, nil
	}
	for try := uint32(0); e.MAC == "" || hasRemoteMAC(e.MAC) && a.state.macs[e.MAC] > 0 && addr.Is6(); try++ {
		e.MAC = remoteMAC(addr, try)
	}
	err := a.createEndpoint(e)
	return a.state.at[addr].remote, err
}

func (a *apply) createEndpoint(e Endpoint) error {
	made, err := a.config.HNS.CreateEndpoint(e)
	if err != nil {
		return fmt.Errorf("cannot create endpoint %v: %w", e.Addrs[0], a.wrote(err))
	}
	a.state.add(made)
	return nil
}

func (a *apply) deleteEndpoint(e Endpoint) error {
	if err := a.config.HNS.DeleteEndpoint(e.ID); err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("cannot delete endpoint %v: %w", e.Addrs[0], a.wrote(err))
	}
	a.state.remove(e.ID)
	return nil
}

// put makes the service have a load balancer. One without endpoints is deleted: it would
// only hold the port.
func (a *apply) put(lb LoadBalancer) error {
	old, ok := a.state.lbs[lb.Frontend]
	lb.ID = old.ID
	switch {
	case len(lb.Endpoints) == 0:
		return a.deleteLoadBalancer(lb.Frontend)
	case ok && old.equal(&lb):
		a.state.setLB(lb) // with its Purpose, which was not read
		return nil
	case ok:
		return a.change(lb)
	}
	return a.createLoadBalancer(lb)
}

// change changes a load balancer in place, or deletes it and makes it again if the service can
// do no better.
func (a *apply) change(lb LoadBalancer) error {
	if !a.replaces {
		has, err := a.config.HNS.ModifyLoadBalancer(lb)
		switch {
		case err == nil && has.equal(&lb):
			a.state.setLB(lb)
			return nil
		case err == nil: // HNS 15.4 accepts and does nothing (kubernetes/kubernetes#131466)
		case !errors.Is(err, ErrNotImplemented):
			return a.config.failed(Modify, lb, a.wrote(err))
		}
		a.replaces = true
		a.config.Log.Warn("this version of Windows cannot modify load balancers: changed ones are deleted and created, which interrupts their Services for a moment")
	}
	if err := a.deleteLoadBalancer(lb.Frontend); err != nil {
		return err
	}
	return a.createLoadBalancer(lb)
}

func (a *apply) createLoadBalancer(lb LoadBalancer) error {
	made, err := a.config.HNS.CreateLoadBalancer(lb)
	if err != nil {
		return a.config.failed(Create, lb, a.wrote(err))
	}
	lb.ID = made.ID
	a.state.setLB(lb)
	a.lbs.Installed(lb.Frontend)
	return nil
}

func (a *apply) deleteLoadBalancer(f Frontend) error {
	lb, ok := a.state.lbs[f]
	if !ok {
		return nil
	}
	if err := a.config.HNS.DeleteLoadBalancer(lb.ID); err != nil && !errors.Is(err, ErrNotFound) {
		return a.config.failed(Delete, lb, a.wrote(err))
	}
	a.state.deleteLB(f)
	return nil
}

// release deletes the load balancers that the Service had and no Service wants, and records which
// remote endpoints it does not need any more.
func (a *apply) release(c *ruleset.Change) error {
	for item := range a.addresses.Items(c.Key) {
		if !a.needed[c.Key][item] {
			a.addresses.Release(c.Key, item)
		}
	}
	var errs []error
	for f := range a.lbs.Items(c.Key) {
		wanted := slices.ContainsFunc(a.plans[c.Key], func(w wanted) bool { return w.settings.Frontend == f })
		if wanted || !a.lbs.Release(c.Key, f) {
			continue
		}
		err := a.deleteLoadBalancer(f)
		switch {
		case concernsAll(err):
			return err
		case err != nil:
			a.lbs.Claim(c.Key, f) // the retry releases it again
			errs = append(errs, err)
		default:
			a.lbs.Removed(f)
		}
	}
	return errors.Join(errs...)
}

// sweep deletes the remote endpoints that no Service needs and no load balancer has. One whose
// change failed has its endpoints until the change succeeds.
func (a *apply) sweep() error {
	var errs []error
	for item := range a.addresses.Unused() {
		e, ok := a.state.endpoints[a.state.at[item.Addr].remote]
		if p := a.planner(); ok && (item.vip && p.isVIP(&e) || !item.vip && p.isRemotePod(&e)) {
			if a.state.inUse(&e, item.vip) {
				continue
			}
			if err := a.ctx.Err(); err != nil {
				return err
			}
			if err := a.deleteEndpoint(e); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		a.addresses.Removed(item)
	}
	return errors.Join(errs...)
}

// prune deletes the load balancers that no Service wants, and the remote endpoints of an
// earlier process that no Service wants. It continues after an error.
func (a *apply) prune() error {
	var errs []error
	for f := range a.lbs.Unused() {
		err := a.deleteLoadBalancer(f)
		if errs = append(errs, err); err == nil {
			a.lbs.Removed(f)
		}
	}
	for _, id := range a.state.broken {
		if err := a.config.HNS.DeleteLoadBalancer(id); err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, fmt.Errorf("cannot delete load balancer %s without a port: %w", id, a.wrote(err)))
		}
	}
	p := a.planner()
	for id, e := range a.state.endpoints {
		vip := p.isVIP(&e)
		if !vip && !p.isRemotePod(&e) {
			continue
		}
		if a.state.inUse(&e, vip) {
			a.addresses.Installed(address{e.Addrs[0], vip}) // a later sweep deletes it
			continue
		}
		if addr := e.Addrs[0]; a.addresses.Users(address{addr, vip}) != 0 && a.state.at[addr].remote == id && (vip || a.state.at[addr].local == "") {
			continue
		}
		errs = append(errs, a.deleteEndpoint(e))
	}
	return errors.Join(errs...)
}
