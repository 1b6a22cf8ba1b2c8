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
	// failed holds the errors of Services that fail alone, and those of Services that wait.
	failed map[tracker.Key]error
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
	plans := make([][]wanted, len(changes))
	for i := range changes {
		c := &changes[i]
		delete(a.waiting, c.Key)
		if c.New == nil || !a.config.serves(c.Key.Family) {
			continue
		}
		if err := a.learnSubnets(c.New); err != nil {
			return err
		}
		plans[i] = a.planner().plan(c.New)
		for _, w := range plans[i] {
			a.lbs.Claim(c.Key, w.settings.Frontend)
		}
	}
	if a.full {
		if err := a.beginFull(); err != nil {
			return err
		}
	}
	for i, plan := range plans {
		if err := a.ctx.Err(); err != nil {
			return err
		}
		if err := a.write(changes[i].Key, plan); err != nil {
			return err
		}
	}
	for i, plan := range plans {
		for f := range a.lbs.Items(changes[i].Key) {
			if !slices.ContainsFunc(plan, func(w wanted) bool { return w.settings.Frontend == f }) {
				a.lbs.Release(changes[i].Key, f)
			}
		}
	}
	err := a.sweep()
	if err != nil && !a.full { // only a full delta can end without stale objects
		err = fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	}
	return err
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
	for _, lb := range a.state.lbs {
		if !slices.Contains(lb.Endpoints, e.ID) {
			continue
		}
		lb.Endpoints = slices.DeleteFunc(slices.Clone(lb.Endpoints), func(id string) bool { return id == e.ID })
		if err := a.put(lb); err != nil {
			return err
		}
	}
	return a.deleteEndpoint(e)
}

// write makes the endpoints and load balancers of a Service. It returns errors that concern more than the Service.
func (a *apply) write(k tracker.Key, plan []wanted) error {
	var errs []error
	var missing []netip.Addr
	for i := range plan {
		lb := plan[i].settings
		ids, without, err := a.resolve(&plan[i])
		missing = append(missing, without...)
		if err == nil {
			lb.Endpoints = ids
			err = a.put(lb)
		}
		if concernsAll(err) {
			return err
		}
		errs = append(errs, err)
	}
	slices.SortFunc(missing, netip.Addr.Compare)
	if missing = slices.Compact(missing); len(missing) != 0 {
		a.waiting[k] = missing
	}
	// Network plugins make no endpoints at the node's own addresses.
	var host, late []netip.Addr
	for _, addr := range missing {
		if slices.Contains(a.config.NodeIPs, addr) {
			host = append(host, addr)
		} else {
			late = append(late, addr)
		}
	}
	if len(host) != 0 && a.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "pods in the host network of this node are left out of load balancers: HNS has no endpoint at the node's address", "addresses", fmt.Sprint(host)) &&
		a.config.Trace != nil && a.config.Trace.LeftOut != nil {
		a.config.Trace.LeftOut(k, host)
	}
	if len(late) != 0 {
		errs = append(errs, &WaitingError{late})
	}
	if err := errors.Join(errs...); err != nil {
		a.failed[k] = err
	}
	return nil
}

// resolve returns the IDs of a load balancer's endpoints, and the addresses of those that the service does not have and the
// network plugin makes or deletes. It makes those of other nodes.
func (a *apply) resolve(w *wanted) (ids []string, missing []netip.Addr, err error) {
	if w.root {
		if a.state.root == "" {
			return nil, nil, nil // Check notices it
		}
		return []string{a.state.root}, nil, nil
	}
	if w.settings.Purpose == ClusterIP && a.state.network.Type == Overlay {
		if _, err := a.remote(a.planner().vipEndpoint(w.settings.Frontend.VIP)); err != nil {
			return nil, nil, err
		}
	}
	for _, e := range w.pool {
		switch id, err := a.endpoint(e); {
		case err != nil:
			return nil, missing, err
		case id != "":
			ids = append(ids, id)
		default:
			missing = append(missing, e.Addr.Addr())
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), missing, nil
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

// sweep deletes the load balancers that no Service wants, and then the remote endpoints that lost their last load balancer.
// After a full read these are all that no load balancer has. One whose change failed has its endpoints until the change
// succeeds. It continues after an error.
func (a *apply) sweep() error {
	var errs []error
	for f := range a.lbs.Unused() {
		if err := a.ctx.Err(); err != nil {
			return err
		}
		if err := a.deleteLoadBalancer(f); err != nil {
			errs = append(errs, err)
			continue
		}
		a.lbs.Removed(f)
	}
	for _, id := range a.state.broken {
		if err := a.config.HNS.DeleteLoadBalancer(id); err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, fmt.Errorf("cannot delete load balancer %s without a port: %w", id, a.wrote(err)))
		}
	}
	a.state.broken = nil
	for id := range a.state.idle {
		e, ok := a.state.endpoints[id]
		if ok && a.planner().owns(&e) && !a.state.inUse(&e, a.planner().isVIP(&e)) {
			if err := a.ctx.Err(); err != nil {
				return err
			}
			if err := a.deleteEndpoint(e); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		delete(a.state.idle, id)
	}
	return errors.Join(errs...)
}
