package socketlb

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// state is the state of a [Backend].
type state struct {
	config Config
	// complaints receives Services that cannot be programmed.
	complaints *complaint.Log

	mu     sync.Mutex
	closed bool
	host   *host
	maps   bpfMaps
	hooks  hooks

	// The model of the maps' content. frontends is nil while the content is unknown.
	node      *ruleset.Node
	frontends map[frontendKey]frontendValue
	// started is set once a full delta was applied.
	started   bool
	slots     driver.Slots[poolKey, endpoint]
	pools     driver.Table[poolKey, []*tracker.Endpoint] // of slots
	members   map[serviceID]map[memberKey]struct{}
	addresses map[[16]byte]address
	// own holds the node's addresses, and bound the cluster IPs among them.
	own, bound map[netip.Addr]bool
	// names are the keys of the Services in the model.
	names map[serviceID]tracker.Key

	// writes counts the entries that were written or deleted.
	writes int
	// missingReported is set once a log line said that connected UDP sockets were not found.
	missingReported bool
}

// poolKey names a pool of a Service.
type poolKey struct {
	service serviceID
	target  uint32
}

var targets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// poolFields are the fields whose change may change the pool of a target.
var poolFields = map[ruleset.Target]ruleset.Field{
	ruleset.TargetCluster: ruleset.FieldCluster | ruleset.FieldHash,
	ruleset.TargetLocal:   ruleset.FieldLocal | ruleset.FieldHash,
}

// errClosed is the error of a closed backend.
var errClosed = fmt.Errorf("socketlb: backend: %w", os.ErrClosed)

// New returns a backend for the cgroup and the network namespace of c. It opens the maps of
// an earlier process, if any, and loads the programs. It attaches nothing: the first full
// delta makes [Backend.Apply] fill the maps and attach the programs, which stay in effect
// when the backend is closed. The error is a [*dataplane.UnsupportedError] that names what is
// missing, wraps [ruleset.ErrConfig], or is another error after which the caller may retry.
func New(ctx context.Context, c Config) (_ *Backend, err error) {
	if c, err = c.withDefaults(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if c.Cgroup == "" {
		if c.Cgroup, err = RootCgroup(); err != nil {
			return nil, err
		}
	}
	b := &Backend{state{config: c, complaints: complaint.NewLog(c.Log)}}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	if b.host, err = openHost(c.NetNS); err != nil {
		return nil, err
	}
	if err := checkPlaces(&c); err != nil {
		return nil, err
	}
	spec, err := readPrograms()
	if err != nil {
		return nil, fmt.Errorf("socketlb: cannot read the BPF programs: %w", err)
	}
	if err := b.maps.open(&b.config, spec.Maps); err != nil {
		return nil, unsupported("creating BPF maps", err)
	}
	b.slots = driver.Slots[poolKey, endpoint]{
		Entries:  b.slotTable(),
		Value:    func(_ poolKey, ep *tracker.Endpoint) endpoint { return endpointOf(ep.Addr) },
		ByWeight: true,
	}
	b.pools = b.slots.Pools()
	if err := b.hooks.load(&b.config, &b.maps, spec, b.host.cookie); err != nil {
		return nil, err
	}
	return b, nil
}

// Probe returns the error that [New] would return, or nil. It changes nothing.
func Probe(ctx context.Context, c Config) error {
	b, err := New(ctx, c)
	if err != nil {
		return err
	}
	return b.Close()
}

// Close waits for a running [Backend.Apply], closes the backend's files and leaves the maps
// and programs in effect. Closing it again does nothing and returns nil.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	b.hooks.close()
	b.maps.close(&b.config)
	if b.host != nil {
		b.host.close()
	}
	return nil
}

// Apply writes d to the maps, as [ruleset.Backend] requires, and attaches the programs. A
// [*ruleset.PartialError] names Services that could not be written; their connections are
// left to the backend behind. It returns ctx's error, or an error that wraps [os.ErrClosed]
// if the backend is closed. All other errors wrap [ruleset.ErrNeedFull].
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return errClosed
	case !d.Full && (b.frontends == nil || !slices.Equal(detects(b.node), detects(d.Node)) || !slices.Equal(b.node.ServiceCIDRs, d.Node.ServiceCIDRs)):
		return ruleset.ErrNeedFull
	}
	failed, err := b.apply(d)
	if err != nil {
		b.frontends = nil
		return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	}
	b.started = true
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed, Pruned: true}
	}
	return nil
}

// detects returns, by family, whether the node recognizes traffic of pods. The pools of all
// frontends depend on it.
func detects(n *ruleset.Node) []bool {
	return []bool{n.LocalTraffic.Detects(tracker.IPv4), n.LocalTraffic.Detects(tracker.IPv6)}
}

// apply takes the steps of ruleset's BACKEND.md, each for all changes before the
// next. It may delete a frontend at any time, because the backend behind serves it then. So a Service
// that failed leaves the maps: the backend behind serves it as it is now, and there may be room for
// another attempt. Package driver, and an error that wraps [ruleset.ErrRefused], would keep the version
// before. The model needs no mark of such a Service, because the next change of it has FieldAll.
func (b *Backend) apply(d *ruleset.Delta) (failed map[tracker.Key]error, err error) {
	var found iter.Seq2[poolKey, []*tracker.Endpoint] // the pools in the maps
	if d.Full {
		if found, err = b.adopt(); err != nil {
			return nil, err
		}
		b.bound = map[netip.Addr]bool{}
	}
	b.node = d.Node
	if d.Full || d.Node != d.OldNode {
		if err := b.writeAddresses(); err != nil && !(d.Full && errors.Is(err, errBound)) {
			return nil, err
		}
	}
	var changes []*ruleset.Change
	for i := range d.Changes {
		if k := d.Changes[i].Key; (k.Protocol == v1.ProtocolTCP || k.Protocol == v1.ProtocolUDP) && slices.Contains(b.config.Families, k.Family) {
			changes = append(changes, &d.Changes[i])
		}
	}
	stale := b.stalePeers(changes, d.Full)
	failed = map[tracker.Key]error{}
	for _, c := range changes {
		if err := errors.Join(b.fillPools(c, d.Full), b.fillMembers(c)); err != nil {
			failed[c.Key] = err
		}
	}
	for _, c := range changes {
		if failed[c.Key] == nil {
			if err := b.writeFrontends(c); err != nil {
				failed[c.Key] = err
			}
		}
	}
	if d.Full {
		if err := b.pruneFrontends(changes); err != nil {
			return nil, err
		}
	}
	for _, c := range changes {
		if err := b.deleteFrontends(c, failed[c.Key] != nil); err != nil {
			return nil, err
		}
	}
	for _, c := range changes {
		trim := b.trim
		if failed[c.Key] != nil {
			trim = b.deletePools
		}
		if err := trim(c); err != nil {
			return nil, err
		}
	}
	if d.Full {
		if err := b.prunePools(changes, found); err != nil {
			return nil, err
		}
		b.names = map[serviceID]tracker.Key{}
	}
	if err := b.nameServices(changes, d.Full); err != nil {
		return nil, err
	}
	if err := b.retry(changes, failed); err != nil {
		return nil, err
	}
	b.abortStale(stale)
	if d.Full {
		return failed, errors.Join(b.maps.pin(&b.config), b.hooks.attach(&b.config))
	}
	return failed, nil
}

// retry writes the failed Services again, which have no entries in the maps. There may be
// room after other entries were deleted. It removes Services that succeed from failed.
func (b *Backend) retry(changes []*ruleset.Change, failed map[tracker.Key]error) error {
	for _, c := range changes {
		if failed[c.Key] == nil {
			continue
		}
		err := errors.Join(b.fillPools(c, true), b.fillMembers(c))
		if err == nil {
			err = b.writeFrontends(c)
		}
		if err == nil {
			delete(failed, c.Key)
			continue
		}
		failed[c.Key] = err
		b.complaints.Write(slog.LevelError, complaint.Port(c.Key.Namespace, c.Key.Name, c.Key.String()), "socketlb: cannot write a service; the backend behind serves it", "error", err)
		if err := errors.Join(b.deleteFrontends(c, true), b.deletePools(c)); err != nil {
			return err
		}
	}
	return nil
}

// adopt reads the entries that this process or an earlier one left in the maps. It returns the
// pools.
func (b *Backend) adopt() (found iter.Seq2[poolKey, []*tracker.Endpoint], err error) {
	if b.frontends, err = readMap[frontendKey, frontendValue](b.maps.frontends); err != nil {
		return nil, err
	}
	if found, err = b.pools.Installed(); err != nil {
		return nil, err
	}
	members, err := readMap[memberKey, byte](b.maps.members)
	if err != nil {
		return nil, err
	}
	b.members = map[serviceID]map[memberKey]struct{}{}
	for k := range members {
		b.noteMember(k)
	}
	b.addresses, err = readMap[[16]byte, address](b.maps.addresses)
	return found, err
}

func keyOfSlot(at driver.Slot[poolKey]) slotKey {
	return slotKey{at.Pool.service, at.Pool.target, uint32(at.N)}
}

// slotTable returns the functions of the map of endpoints.
func (b *Backend) slotTable() driver.Table[driver.Slot[poolKey], endpoint] {
	return driver.Table[driver.Slot[poolKey], endpoint]{
		Installed: func() (iter.Seq2[driver.Slot[poolKey], endpoint], error) {
			endpoints, err := readMap[slotKey, endpoint](b.maps.endpoints)
			return func(yield func(driver.Slot[poolKey], endpoint) bool) {
				for k, e := range endpoints {
					if !yield(driver.Slot[poolKey]{Pool: poolKey{k.Service, k.Target}, N: int(k.Slot)}, e) {
						return
					}
				}
			}, err
		},
		PutAll: func(at []driver.Slot[poolKey], all []endpoint) error {
			return putAll(b, b.maps.endpoints, keysOfSlots(at), all)
		},
		DeleteAll: func(at []driver.Slot[poolKey]) error { return removeAll(b, b.maps.endpoints, keysOfSlots(at)) },
	}
}

func keysOfSlots(at []driver.Slot[poolKey]) []slotKey {
	out := make([]slotKey, len(at))
	for i := range at {
		out[i] = keyOfSlot(at[i])
	}
	return out
}

// serves reports whether connections to a Service can be translated.
func serves(s *ruleset.Port) bool {
	return s != nil && s.Hash() == tracker.HashNone
}

// fillPools writes the new endpoints of a change.
func (b *Backend) fillPools(c *ruleset.Change, full bool) error {
	for _, target := range targets {
		if c.Fields&poolFields[target] == 0 && !full {
			continue
		}
		var eps []*tracker.Endpoint
		if serves(c.New) {
			eps = c.New.Pool(target)
		}
		if err := b.pools.Put(poolKey{idOf(c.Key), uint32(target)}, eps); err != nil {
			return err
		}
	}
	return nil
}

// trim deletes the entries that a Service no longer needs. No frontend uses them: those above a
// pool's size.
func (b *Backend) trim(c *ruleset.Change) error {
	id := idOf(c.Key)
	for _, t := range targets {
		k := poolKey{id, uint32(t)}
		trim := b.pools.Trim
		if b.slots.Len(k) == 0 {
			trim = b.pools.Delete
		}
		if err := trim(k); err != nil {
			return err
		}
	}
	return b.trimMembers(id, membersOf(c.New))
}

// deletePools deletes the pools and members of a failed Service, which has no frontends.
func (b *Backend) deletePools(c *ruleset.Change) error {
	id := idOf(c.Key)
	for _, t := range targets {
		if err := b.pools.Delete(poolKey{id, uint32(t)}); err != nil {
			return err
		}
	}
	return b.trimMembers(id, nil)
}

// membersOf returns the members that a Service must have.
func membersOf(s *ruleset.Port) map[memberKey]struct{} {
	udp := s != nil && s.Key.Protocol == v1.ProtocolUDP
	if !serves(s) || s.Spec.Affinity == 0 && !udp {
		return nil
	}
	out := map[memberKey]struct{}{}
	if udp {
		for _, ep := range s.Endpoints {
			if ep.Ready || ep.Serving {
				out[memberKey{idOf(s.Key), flowMember, endpointOf(ep.Addr)}] = struct{}{}
			}
		}
		for _, ep := range s.Selection.Reachable {
			out[memberKey{idOf(s.Key), flowMember, endpointOf(ep.Addr)}] = struct{}{}
		}
	}
	for _, t := range targets {
		if s.Spec.Affinity == 0 {
			break
		}
		for _, ep := range s.Pool(t) {
			out[memberKey{idOf(s.Key), uint32(t), endpointOf(ep.Addr)}] = struct{}{}
		}
	}
	return out
}

// fillMembers writes the new members of a change.
func (b *Backend) fillMembers(c *ruleset.Change) error {
	var added []memberKey
	for k := range membersOf(c.New) {
		if _, ok := b.members[k.Service][k]; !ok {
			b.noteMember(k) // a write that fails may have taken effect
			added = append(added, k)
		}
	}
	return putAll(b, b.maps.members, added, slices.Repeat([]byte{1}, len(added)))
}

func (b *Backend) noteMember(k memberKey) {
	if b.members[k.Service] == nil {
		b.members[k.Service] = map[memberKey]struct{}{}
	}
	b.members[k.Service][k] = struct{}{}
}

// trimMembers deletes the members of a Service that are not in want.
func (b *Backend) trimMembers(id serviceID, want map[memberKey]struct{}) error {
	var gone []memberKey
	for k := range b.members[id] {
		if _, ok := want[k]; !ok {
			gone = append(gone, k)
		}
	}
	if err := removeAll(b, b.maps.members, gone); err != nil {
		return err
	}
	for _, k := range gone {
		delete(b.members[id], k)
	}
	if len(b.members[id]) == 0 {
		delete(b.members, id)
	}
	return nil
}

// valueOf returns the entry of a frontend, and whether any of its connections are translated.
// Connections whose endpoint cannot be chosen when a socket connects are left to the backend
// behind: see DESIGN.md.
func (b *Backend) valueOf(s *ruleset.Port, f *ruleset.Frontend) (frontendValue, bool) {
	if !serves(s) || len(f.Sources) != 0 {
		return frontendValue{}, false
	}
	if f.Kind == ruleset.KindClusterIP && b.own[f.Addr] {
		b.bound[f.Addr] = true
		return frontendValue{}, false
	}
	id := idOf(s.Key)
	poolOf := func(t ruleset.Target) pool {
		if len(s.Pool(t)) == 0 || slices.ContainsFunc(s.Pool(t), b.dropped) {
			return pool{}
		}
		return pool{uint32(t), uint32(b.slots.Len(poolKey{id, uint32(t)}))}
	}
	v := frontendValue{Service: id, Affinity: uint64(s.Spec.Affinity), Node: poolOf(f.Internal)}
	recognized := b.node.LocalTraffic.Detects(s.Key.Family)
	if !b.config.NodeOnly && !f.Masquerade.Applies(recognized, false) {
		v.Pods = poolOf(f.Target)
		if recognized {
			v.Pods = poolOf(f.Internal)
		}
	}
	return v, v.Node.Size != 0 || v.Pods.Size != 0
}

// dropped reports whether the backend behind drops packets to an endpoint that it did not translate
// itself.
func (b *Backend) dropped(ep *tracker.Endpoint) bool {
	return slices.ContainsFunc(b.node.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(ep.Addr.Addr()) })
}

// writeFrontends writes the new and changed frontends of a change.
func (b *Backend) writeFrontends(c *ruleset.Change) error {
	if c.New == nil {
		return nil
	}
	for i := range c.New.Frontends {
		f := &c.New.Frontends[i]
		v, ok := b.valueOf(c.New, f)
		k := keyOf(f, c.Key)
		if !ok || b.frontends[k] == v {
			continue
		}
		if err := put(b, b.maps.frontends, k, v); err != nil {
			return err
		}
		b.frontends[k] = v
	}
	return nil
}

// deleteFrontends deletes the frontends that a Service no longer has or that translate
// nothing. If the Service failed, it deletes all its frontends.
func (b *Backend) deleteFrontends(c *ruleset.Change, failed bool) error {
	stale := map[frontendKey]bool{}
	for s := range c.Before() {
		for i := range s.Frontends {
			stale[keyOf(&s.Frontends[i], c.Key)] = true
		}
	}
	if c.New != nil {
		for i := range c.New.Frontends {
			_, ok := b.valueOf(c.New, &c.New.Frontends[i])
			stale[keyOf(&c.New.Frontends[i], c.Key)] = failed || !ok
		}
	}
	id := idOf(c.Key)
	for k, gone := range stale {
		// Another Service may own the frontend by now. If c.New owns it, but failed or
		// translates nothing, the entry may be that of its former owner.
		v, ok := b.frontends[k]
		if !gone || !ok || v.Service != id && !owns(c.New, k) {
			continue
		}
		if err := b.deleteFrontend(k); err != nil {
			return err
		}
	}
	return nil
}

// owns reports whether a Service has a frontend.
func owns(s *ruleset.Port, k frontendKey) bool {
	return s != nil && slices.ContainsFunc(s.Frontends, func(f ruleset.Frontend) bool { return keyOf(&f, s.Key) == k })
}

func (b *Backend) deleteFrontend(k frontendKey) error {
	if err := remove(b, b.maps.frontends, k); err != nil {
		return err
	}
	delete(b.frontends, k)
	return nil
}

// pruneFrontends deletes the frontends that are not in a full delta.
func (b *Backend) pruneFrontends(changes []*ruleset.Change) error {
	wanted := map[frontendKey]bool{}
	for _, c := range changes {
		if s := c.New; s != nil {
			for j := range s.Frontends {
				wanted[keyOf(&s.Frontends[j], s.Key)] = true
			}
		}
	}
	for k := range b.frontends {
		if !wanted[k] {
			if err := b.deleteFrontend(k); err != nil {
				return err
			}
		}
	}
	return nil
}

// prunePools deletes the pools and members of Services that are not in a full delta.
func (b *Backend) prunePools(changes []*ruleset.Change, found iter.Seq2[poolKey, []*tracker.Endpoint]) error {
	wanted := map[serviceID]bool{}
	for _, c := range changes {
		wanted[idOf(c.Key)] = true
	}
	for k := range found {
		if wanted[k.service] {
			continue
		}
		if err := b.pools.Delete(k); err != nil {
			return err
		}
	}
	for id := range b.members {
		if !wanted[id] {
			if err := b.trimMembers(id, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// errBound is an error of writeAddresses.
var errBound = errors.New("the node got or lost an address that may be a cluster IP")

// writeAddresses writes the changes of the node's addresses. It returns errBound if frontends
// may have to be added or deleted because of them.
func (b *Backend) writeAddresses() error {
	list, err := b.host.addresses()
	if err != nil {
		return err
	}
	before, added := b.own, map[[16]byte]bool{}
	b.own = map[netip.Addr]bool{}
	want := map[[16]byte]address{}
	for _, a := range list {
		b.own[a] = true
		added[a.As16()] = !before[a]
		family := tracker.FamilyOf(a)
		v := address{}
		if b.node.NodePorts(family).Allows(a) {
			v.NodePorts = 1
		}
		if slices.ContainsFunc(b.node.Info.Addresses, func(own netip.Addr) bool { return own.Unmap() == a }) {
			v.Source = 1
		}
		if family == tracker.IPv4 {
			v.Family = [4]byte{2: 0xff, 3: 0xff}
		}
		if v.NodePorts+v.Source != 0 && slices.Contains(b.config.Families, family) {
			want[a.As16()] = v
		}
	}
	for a, v := range want {
		if b.addresses[a] != v {
			if err := put(b, b.maps.addresses, a, v); err != nil {
				return err
			}
			b.addresses[a] = v
		}
	}
	for a := range b.addresses {
		if _, ok := want[a]; !ok {
			if err := remove(b, b.maps.addresses, a); err != nil {
				return err
			}
			delete(b.addresses, a)
		}
	}
	for a := range b.bound {
		if !b.own[a] {
			return errBound
		}
	}
	for k := range b.frontends {
		if added[k.Addr] {
			return errBound
		}
	}
	return nil
}

// Counters returns the numbers of translated connections.
func (b *Backend) Counters() (Counters, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return Counters{}, errClosed
	}
	var sums [counterCount]uint64
	for i := range sums {
		var each []uint64
		if err := b.maps.counters.Lookup(uint32(i), &each); err != nil {
			return Counters{}, fmt.Errorf("socketlb: cannot read the counters: %w", err)
		}
		for _, n := range each {
			sums[i] += n
		}
	}
	return Counters{Node: sums[counterNode], Pods: sums[counterPods]}, nil
}
