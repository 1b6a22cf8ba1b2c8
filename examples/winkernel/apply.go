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
// the other load balancers of the Service change, and endpoints go that none of them has or wants.
type apply struct {
	*state
	backend *Backend
	ctx     context.Context
	full    bool
	// failed holds the errors of Services that fail alone, and those of Services that wait.
	failed map[tracker.Key]error
	// listed and networkRead are set once the endpoints and the network were read in this call.
	listed, networkRead bool
}

// run brings the changes into effect. Endpoints come before the load balancers that use them
// and go after them, and a load balancer that stays is never missing. A failed write does not end
// the steps of its Service: its other load balancers follow the change. An error means that the
// rest was not done.
func (a *apply) run(changes []ruleset.Change) error {
	a.listed, a.networkRead = a.full, a.full
	plans := make([][]wanted, len(changes))
	for i := range changes {
		c := &changes[i]
		delete(a.waiting, c.Key)
		for f := range a.services.Items(c.Key) {
			a.services.Release(c.Key, f)
		}
		if c.New == nil || !a.config.serves(c.Key.Family) {
			continue
		}
		if err := a.learnSubnets(c.New); err != nil {
			return err
		}
		plans[i] = a.plan(c.New)
		for _, w := range plans[i] {
			a.services.Claim(c.Key, w.Frontend)
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
	if !errors.Is(err, ErrExists) && !errors.Is(err, ErrInvalidAddr) {
		a.backend.state = nil
	}
	return err
}

// learnSubnets reads an overlay's network again if it does not know an endpoint of the Service:
// a node may have joined.
func (a *apply) learnSubnets(s *ruleset.Port) error {
	if a.networkRead || a.network.Type != Overlay || !slices.ContainsFunc(s.Selection.Reachable, func(e *tracker.Endpoint) bool {
		_, known := a.network.provider(e.Addr.Addr())
		return !known && !a.local(e)
	}) {
		return nil
	}
	n, err := a.config.readNetwork()
	if err == nil && n.ID != a.network.ID {
		err = fmt.Errorf("winkernel: network %q was replaced: %w", n.Name, ErrNotFound)
	}
	if err != nil {
		a.backend.state = nil
		return err
	}
	a.network, a.networkRead = n, true
	return nil
}

// beginFull makes the source VIP of an overlay and deletes endpoints for pods that moved to
// another node.
func (a *apply) beginFull() error {
	if a.network.Type != Overlay {
		return nil
	}
	if a.at[a.config.SourceVIP].local == "" {
		if err := a.createEndpoint(a.sourceEndpoint()); err != nil {
			return err
		}
	}
	a.waiting[tracker.Key{}] = []netip.Addr{a.config.SourceVIP}
	for _, e := range a.endpoints {
		if !a.isRemotePod(&e) || a.remoteEndpoint(e.Addrs[0]).Provider == e.Provider {
			continue
		}
		// The service refuses a second endpoint with the address.
		for _, lb := range a.lbs {
			if !slices.Contains(lb.Endpoints, e.ID) {
				continue
			}
			lb.Endpoints = slices.DeleteFunc(slices.Clone(lb.Endpoints), func(id string) bool { return id == e.ID })
			if err := a.put(lb); err != nil {
				return err
			}
		}
		if err := a.deleteEndpoint(e); err != nil {
			return err
		}
	}
	return nil
}

// write makes the endpoints and load balancers of a Service. It returns errors that concern more than the Service.
func (a *apply) write(k tracker.Key, plan []wanted) error {
	var errs []error
	var missing []netip.Addr
	for i := range plan {
		w := &plan[i]
		without, err := a.resolve(w)
		missing = append(missing, without...)
		if err == nil {
			err = a.put(w.LoadBalancer)
		}
		if concernsAll(err) {
			return err
		}
		if err != nil { // the next try needs no new endpoints
			a.claim(w.Frontend, w.Endpoints)
			errs = append(errs, err)
		}
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
	if len(host) != 0 && a.backend.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "pods in the host network of this node are left out of load balancers: HNS has no endpoint at the node's address", "addresses", fmt.Sprint(host)) &&
		a.config.Trace != nil && a.config.Trace.LeftOut != nil {
		a.config.Trace.LeftOut(k, host)
	}
	if len(late) != 0 {
		errs = append(errs, &WaitingError{late})
	}
	if len(errs) != 0 {
		a.failed[k] = errors.Join(errs...)
	}
	return nil
}

// resolve sets the endpoints of a load balancer. It returns the addresses of those that the service does not have and the
// network plugin makes or deletes. It makes those of other nodes.
func (a *apply) resolve(w *wanted) (missing []netip.Addr, err error) {
	if w.Purpose == HealthCheck {
		if a.root != "" { // or else Check notices it
			w.Endpoints = []string{a.root}
		}
		return nil, nil
	}
	if w.Purpose == ClusterIP && a.network.Type == Overlay {
		if _, err := a.remote(a.vipEndpoint(w.Frontend.VIP)); err != nil {
			return nil, err
		}
	}
	for _, e := range w.pool {
		switch id, err := a.endpoint(e); {
		case err != nil:
			return missing, err
		case id != "":
			w.Endpoints = append(w.Endpoints, id)
		default:
			missing = append(missing, e.Addr.Addr())
		}
	}
	slices.Sort(w.Endpoints)
	w.Endpoints = slices.Compact(w.Endpoints)
	return missing, nil
}

// endpoint returns the ID of an endpoint. It returns "" for a pod of this node whose endpoint
// the network plugin has not made, and for one of another node whose address still belongs to
// a pod here.
func (a *apply) endpoint(e *tracker.Endpoint) (string, error) {
	addr, local := e.Addr.Addr(), a.local(e)
	if there := a.at[addr].local != ""; there != local && (local || e.Node != "") && !a.listed {
		if err := a.readEndpoints(); err != nil {
			a.backend.state = nil
			return "", err
		}
		a.listed = true
	}
	at := a.at[addr]
	switch {
	case local, at.local != "" && e.Node == "":
		return at.local, nil
	case at.local != "":
		return "", nil
	}
	return a.remote(a.remoteEndpoint(addr))
}

// remote returns the ID of the remote endpoint with the address of e, and makes e if there is
// none.
func (a *apply) remote(e Endpoint) (string, error) {
	addr := e.Addrs[0]
	if id := a.at[addr].remote; id != "" {
		return id, nil
	}
	for try := uint32(0); e.MAC == "" || hasRemoteMAC(e.MAC) && a.macs[e.MAC] > 0 && addr.Is6(); try++ {
		e.MAC = remoteMAC(addr, try)
	}
	err := a.createEndpoint(e)
	return a.at[addr].remote, err
}

func (a *apply) createEndpoint(e Endpoint) error {
	made, err := a.config.HNS.CreateEndpoint(e)
	if err != nil {
		return fmt.Errorf("cannot create endpoint %v: %w", e.Addrs[0], a.wrote(err))
	}
	a.add(made)
	return nil
}

func (a *apply) deleteEndpoint(e Endpoint) error {
	if err := a.config.HNS.DeleteEndpoint(e.ID); err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("cannot delete endpoint %v: %w", e.Addrs[0], a.wrote(err))
	}
	a.remove(e)
	return nil
}

// put makes the service have a load balancer. One without endpoints is deleted: it would
// only hold the port. One is changed in place, or deleted and made again if the service can do no better.
func (a *apply) put(lb LoadBalancer) error {
	old, ok := a.lbs[lb.Frontend]
	lb.ID = old.ID
	switch {
	case len(lb.Endpoints) == 0:
		return a.deleteLoadBalancer(lb.Frontend)
	case ok && old.equal(&lb):
		a.setLB(lb) // with its Purpose, which was not read
		return nil
	case ok && !a.backend.replaces:
		has, err := a.config.HNS.ModifyLoadBalancer(lb)
		switch {
		case err == nil && has.equal(&lb):
			a.setLB(lb)
			return nil
		case err == nil: // HNS 15.4 accepts and does nothing (kubernetes/kubernetes#131466)
		case !errors.Is(err, ErrNotImplemented):
			return a.config.failed("modify", lb, a.wrote(err))
		}
		a.backend.replaces = true
		a.config.Log.Warn("this version of Windows cannot modify load balancers: changed ones are deleted and created, which interrupts their Services for a moment")
	}
	if err := a.deleteLoadBalancer(lb.Frontend); err != nil {
		return err
	}
	made, err := a.config.HNS.CreateLoadBalancer(lb)
	if err != nil {
		return a.config.failed("create", lb, a.wrote(err))
	}
	lb.ID = made.ID
	a.setLB(lb)
	return nil
}

// deleteLoadBalancer deletes a load balancer, if the service has it.
func (a *apply) deleteLoadBalancer(f Frontend) error {
	if lb, ok := a.lbs[f]; ok {
		if err := a.config.HNS.DeleteLoadBalancer(lb.ID); err != nil && !errors.Is(err, ErrNotFound) {
			return a.config.failed("delete", lb, a.wrote(err))
		}
	}
	a.deleteLB(f)
	return nil
}

// sweep deletes the load balancers that no Service wants, and then the remote endpoints that no load balancer
// has or wants. It continues after an error.
func (a *apply) sweep() error {
	var errs []error
	for f := range a.services.Unused() {
		if err := a.ctx.Err(); err != nil {
			return err
		}
		errs = append(errs, a.deleteLoadBalancer(f))
	}
	for _, id := range a.broken {
		if err := a.config.HNS.DeleteLoadBalancer(id); err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, fmt.Errorf("cannot delete load balancer %s without a port: %w", id, a.wrote(err)))
		}
	}
	a.broken = nil
	for id := range a.users.Unused() {
		if err := a.ctx.Err(); err != nil {
			return err
		}
		if e, ok := a.endpoints[id]; ok && a.owns(&e) {
			errs = append(errs, a.deleteEndpoint(e))
		} else {
			a.users.Removed(id)
		}
	}
	return errors.Join(errs...)
}
