package socketlb

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// Backend translates the connections of one cgroup. It implements [ruleset.Backend]. Its
// methods are safe for concurrent use. Methods that are called after [Backend.Close] change
// nothing and return an error that wraps [os.ErrClosed].
type Backend struct {
	config Config
	// complaints receives Services that cannot be programmed.
	complaints *complaint.Log

	mu     sync.Mutex
	closed bool
	host   *host
	maps   bpfMaps
	hooks  hooks

	node *ruleset.Node
	// driver writes the tables in their order. known means that it knows what the maps have, and
	// started is set once a full delta was applied.
	driver         *driver.Driver
	slots          driver.Slots[poolKey, endpoint]
	members        *driver.Table[memberKey, byte]
	frontends      *driver.Table[frontendKey, frontendValue]
	names          *driver.Table[serviceID, tracker.Key]
	known, started bool
	// refused has the Services that want no entries for now, because a write failed.
	refused map[tracker.Key]error
	// found holds what a full delta found in the maps.
	found struct {
		frontends map[frontendKey]frontendValue
		members   map[memberKey]byte
	}
	addresses map[[16]byte]address
	// own holds the node's addresses, and bound the cluster IPs among them.
	own, bound map[netip.Addr]bool

	// writes counts the entries that were written or deleted.
	writes int
	// missingReported is set once a log line said that connected UDP sockets were not found.
	missingReported bool
}

type poolKey struct {
	service serviceID
	target  uint32
}

var errClosed = fmt.Errorf("socketlb: backend: %w", os.ErrClosed)

// New returns a backend for the cgroup and the network namespace of c. It opens the maps of
// an earlier process, if any, and loads the programs. It attaches nothing: the first full
// delta makes [Backend.Apply] fill the maps and attach the programs, which stay in effect
// when the backend is closed. The error is a [*dataplane.UnsupportedError] that names the
// missing requirement, wraps [ruleset.ErrConfig], or is another error after which the
// caller may retry.
func New(ctx context.Context, c Config) (_ *Backend, err error) {
	if c, err = c.withDefaults(ctx); err != nil {
		return nil, err
	}
	if c.Cgroup == "" {
		if c.Cgroup, err = RootCgroup(); err != nil {
			return nil, err
		}
	}
	b := &Backend{config: c, maps: bpfMaps{}, complaints: complaint.NewLog(c.Log)}
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
	if err := b.newDriver(); err != nil {
		return nil, err
	}
	if err := b.hooks.load(b.maps, spec, b.host.cookie); err != nil {
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
	for _, k := range b.hooks {
		k.close()
		k.program.Close()
	}
	for _, m := range b.maps {
		m.Close()
	}
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
	case !d.Full && (!b.known || !slices.Equal(detects(b.node), detects(d.Node)) || !slices.Equal(b.node.ServiceCIDRs, d.Node.ServiceCIDRs)):
		return ruleset.ErrNeedFull
	}
	b.known = false
	failed, err := b.apply(ctx, d)
	if err != nil {
		return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	}
	b.known, b.started = true, true
	if len(failed) != 0 {
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}

// detects returns, by family, whether the node recognizes traffic of pods. The pools of all
// frontends depend on it.
func detects(n *ruleset.Node) []bool {
	return []bool{n.LocalTraffic.Detects(tracker.IPv4), n.LocalTraffic.Detects(tracker.IPv6)}
}

func (b *Backend) apply(ctx context.Context, d *ruleset.Delta) (failed map[tracker.Key]error, err error) {
	if d.Full {
		if b.addresses, err = readMap[[16]byte, address](b.maps["addresses"]); err != nil {
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
	if failed, err = b.write(ctx, d, true); err != nil {
		return nil, err
	}
	b.abortStale(b.stalePeers(d.Changes))
	b.found.frontends, b.found.members = nil, nil
	if d.Full {
		return failed, errors.Join(b.maps.pin(&b.config), b.hooks.attach(&b.config))
	}
	return failed, nil
}

// write writes a delta to the maps. Services that fail leave them, because the backend behind serves
// them as they are now. If again is set, they are tried again, because there may be room then.
func (b *Backend) write(ctx context.Context, d *ruleset.Delta, again bool) (failed map[tracker.Key]error, err error) {
	err = b.driver.Apply(ctx, d)
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) {
		return nil, err
	}
	rest := &ruleset.Delta{Node: d.Node, OldNode: d.Node}
	for _, c := range d.Changes {
		if err := partial.Failed[c.Key]; err != nil {
			rest.Changes = append(rest.Changes, c)
			if !again {
				b.complaints.Write(slog.LevelError, complaint.Port(c.Key.Namespace, c.Key.Name, c.Key.String()), "socketlb: cannot write a service; the backend behind serves it", "error", err)
			}
		}
	}
	b.refused = partial.Failed
	err = b.driver.Apply(ctx, rest)
	b.refused = nil
	if err != nil || !again {
		return partial.Failed, err
	}
	return b.write(ctx, rest, false)
}

// newDriver sets the tables and the driver that writes them. Frontends come last, so that their pools exist.
func (b *Backend) newDriver() (err error) {
	b.slots.Table = driver.Table[driver.Slot[poolKey], endpoint]{
		Installed: func(*ruleset.Delta) (iter.Seq2[driver.Slot[poolKey], endpoint], error) {
			endpoints, err := readMap[slotKey, endpoint](b.maps["endpoints"])
			return func(yield func(driver.Slot[poolKey], endpoint) bool) {
				for k, e := range endpoints {
					if !yield(driver.Slot[poolKey]{Pool: poolKey{k.Service, k.Target}, N: int(k.Slot)}, e) {
						return
					}
				}
			}, err
		},
		PutAll: func(at []driver.Slot[poolKey], all []endpoint) error {
			return putAll(b, b.maps["endpoints"], keysOfSlots(at), all)
		},
		DeleteAll: func(at []driver.Slot[poolKey]) error { return removeAll(b, b.maps["endpoints"], keysOfSlots(at)) },
	}
	b.members = tableOf(b, b.maps["members"], &b.found.members)
	b.frontends = tableOf(b, b.maps["frontends"], &b.found.frontends)
	b.names = b.namesTable()
	b.driver, err = driver.New(driver.Plane{Tables: []driver.Ordered{b.names, &b.slots, b.members, b.frontends}, Want: b.want})
	return err
}

// tableOf returns a table whose entries are those of a map. A full delta stores the ones that it finds.
func tableOf[K, V comparable](b *Backend, m *ebpf.Map, found *map[K]V) *driver.Table[K, V] {
	return &driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (_ iter.Seq2[K, V], err error) {
			*found, err = readMap[K, V](m)
			return maps.All(*found), err
		},
		PutAll:    func(keys []K, values []V) error { return putAll(b, m, keys, values) },
		DeleteAll: func(keys []K) error { return removeAll(b, m, keys) },
		Equal:     func(a, b V) bool { return a == b },
	}
}

func keyOfSlot(at driver.Slot[poolKey]) slotKey {
	return slotKey{at.Pool.service, at.Pool.target, uint32(at.N)}
}

func keysOfSlots(at []driver.Slot[poolKey]) []slotKey {
	out := make([]slotKey, len(at))
	for i := range at {
		out[i] = keyOfSlot(at[i])
	}
	return out
}

// serves reports whether connections to a Service can be translated.
func (b *Backend) serves(s *ruleset.Port) bool {
	return s.Hash() == tracker.HashNone && s.Key.Protocol != v1.ProtocolSCTP && slices.Contains(b.config.Families, s.Key.Family)
}

// want requests the entries of a Service.
func (b *Backend) want(s *ruleset.Port) {
	if !b.serves(s) {
		return
	}
	id := idOf(s.Key)
	if b.names.Want(id, s.Key); b.refused[s.Key] != nil {
		return
	}
	sizes := map[ruleset.Target]int{}
	for k, eps := range driver.Pools(s, false) {
		var pool []endpoint
		for i, n := range ruleset.Shares(eps) {
			for range n {
				pool = append(pool, endpointOf(eps[i].Addr))
			}
		}
		sizes[k.Target] = b.slots.WantPool(poolKey{id, uint32(k.Target)}, pool)
	}
	for k := range membersOf(s) {
		b.members.Want(k, 1)
	}
	for i := range s.Frontends {
		if v, ok := b.valueOf(s, &s.Frontends[i], sizes); ok {
			b.frontends.Want(keyOf(&s.Frontends[i], s.Key), v)
		}
	}
}

// membersOf returns the members that a Service must have.
func membersOf(s *ruleset.Port) map[memberKey]struct{} {
	udp := s != nil && s.Key.Protocol == v1.ProtocolUDP
	if s == nil || s.Hash() != tracker.HashNone || s.Spec.Affinity == 0 && !udp {
		return nil
	}
	out := map[memberKey]struct{}{}
	if udp {
		for _, ep := range s.Endpoints {
			if ep.Ready || ep.Serving {
				out[memberKey{idOf(s.Key), flowMember, endpointOf(ep.Addr)}] = struct{}{}
			}
		}
	}
	if s.Spec.Affinity != 0 {
		for k, eps := range driver.Pools(s, false) {
			for _, ep := range eps {
				out[memberKey{idOf(s.Key), uint32(k.Target), endpointOf(ep.Addr)}] = struct{}{}
			}
		}
	}
	return out
}

// valueOf returns the entry of a frontend, and whether any of its connections are translated.
// Connections whose endpoint cannot be chosen when a socket connects are left to the backend
// behind: see DESIGN.md.
func (b *Backend) valueOf(s *ruleset.Port, f *ruleset.Frontend, sizes map[ruleset.Target]int) (frontendValue, bool) {
	if len(f.Sources) != 0 {
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
		return pool{uint32(t), uint32(sizes[t])}
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
	var keys, gone [][16]byte
	var values []address
	for a, v := range want {
		if b.addresses[a] != v {
			keys, values = append(keys, a), append(values, v)
		}
	}
	for a := range b.addresses {
		if _, ok := want[a]; !ok {
			gone = append(gone, a)
		}
	}
	if err := errors.Join(putAll(b, b.maps["addresses"], keys, values), removeAll(b, b.maps["addresses"], gone)); err != nil {
		return err
	}
	b.addresses = want
	for a := range b.bound {
		if !b.own[a] {
			return errBound
		}
	}
	for k := range b.frontends.All() {
		if added[k.Addr] {
			return errBound
		}
	}
	return nil
}
