package ruleset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// plane is a model data plane: maps keyed by frontend, by Service and by endpoint.
// Its backend applies only what a delta contains, so the maps are correct only if
// deltas are.
type plane struct {
	t    *testing.T
	r    *rand.Rand
	name string
	// prunes: a Full delta removes everything that it does not contain. Without
	// prunes, the changes alone must leave nothing behind.
	prunes bool
	// failures is the percentage of Applies that fail.
	failures int
	// gated is the percentage of changes that a Gate in front of the plane fails, 0 for no Gate. If
	// it is negative, the Gate is open.
	gated int
	// serves, if not nil, reports whether a Service is in the part of this plane.
	serves func(*Port) bool
	// during, if not nil, is called in the middle of an Apply.
	during func()

	// fronts has the ID of the owner and the content. A plane that fails knows by it, and by the
	// IDs in pools and eps, what it wrote of a Service.
	fronts map[l4Key]owned
	pools  map[poolKey]string
	eps    map[epKey]*tracker.Endpoint
	ids    map[uint32]tracker.Key

	// status is what the cursor knew after the Sync before.
	status map[tracker.Key]Status

	// moved counts takeovers, swapped the takeovers in a circle.
	moved, swapped int

	acked    map[tracker.Key]*Port // as accepted by this backend
	node     *Node
	gen      uint64
	needFull bool
	failed   map[tracker.Key]bool // parts may be in effect
}

type owned struct {
	id   uint32
	text string
}

type poolKey struct {
	id     uint32
	target Target
}

type epKey struct {
	id   uint32
	addr netip.AddrPort
}

func newPlane(t *testing.T, r *rand.Rand, name string, prunes bool, failures int) *plane {
	return &plane{
		t: t, r: r, name: name, prunes: prunes, failures: failures,
		fronts: map[l4Key]owned{}, pools: map[poolKey]string{}, eps: map[epKey]*tracker.Endpoint{},
		ids: map[uint32]tracker.Key{}, acked: map[tracker.Key]*Port{}, needFull: true, failed: map[tracker.Key]bool{}, status: map[tracker.Key]Status{},
	}
}

func front(s *Port, f Frontend) owned { return owned{s.ID, show(f)} }

// setPool sets or deletes the text of a pool.
func setPool(pools map[poolKey]string, s *Port, t Target) {
	delete(pools, poolKey{s.ID, t})
	if s.HasPool(t) {
		pools[poolKey{s.ID, t}] = fmt.Sprint(s.Pool(t))
	}
}

// op is one write to the maps for a Service.
type op struct {
	key tracker.Key
	do  func()
}

// check compares a delta with the Services that this backend accepted before.
func (p *plane) check(d *Delta) {
	if p.needFull && !d.Full {
		p.t.Fatalf("%s: requested a full delta, got another", p.name)
	}
	if d.Gen < p.gen || d.OldNode != p.node || d.Node == nil {
		p.t.Fatalf("%s: gen %d after %d; old node %p, accepted %p", p.name, d.Gen, p.gen, d.OldNode, p.node)
	}
	seen, ids := map[tracker.Key]bool{}, map[uint32]bool{}
	for _, c := range d.Changes {
		if seen[c.Key] {
			p.t.Fatalf("%s: %s twice", p.name, c.Key)
		}
		seen[c.Key] = true
		if diff(c.Old, p.acked[c.Key]) != 0 {
			p.t.Fatalf("%s: %s: Old is not what was acknowledged\n old %v\n ack %v\n new %v\nfull %v", p.name, c.Key, c.Old, p.acked[c.Key], c.New, d.Full)
		}
		if c.Old == nil && c.New == nil && !p.failed[c.Key] && p.gated == 0 {
			p.t.Fatalf("%s: %s: empty change", p.name, c.Key)
		}
		want := diff(c.Old, c.New)
		if d.Full || p.failed[c.Key] || p.gated != 0 && c.Fields == FieldAll {
			want = FieldAll
		}
		if c.Fields != want || want == 0 {
			p.t.Fatalf("%s: %s: fields are %s, want %s", p.name, c.Key, c.Fields, want)
		}
		for _, s := range []*Port{c.Old, c.New} {
			if s != nil && (s.ID != c.ID() || s.ID == 0 || s.Key != c.Key) {
				p.t.Fatalf("%s: %s: id %d, key %s", p.name, c.Key, s.ID, s.Key)
			}
		}
		if ids[c.ID()] {
			p.t.Fatalf("%s: id %d twice", p.name, c.ID())
		}
		ids[c.ID()] = true
		// Iterations may stop early.
		for range c.Upserted() {
			break
		}
		for range c.Removed() {
			break
		}
		for range c.GoneFrontends() {
			break
		}
	}
	for k := range p.acked {
		if d.Full && !seen[k] {
			p.t.Fatalf("%s: full delta without %s", p.name, k)
		}
	}
	if p.serves == nil { // otherwise the other Service may be in another part
		p.checkLinks(d)
	}
}

// checkLinks compares the takeovers of a delta with their definition, and checks the
// order of the changes.
func (p *plane) checkLinks(d *Delta) {
	p.t.Helper()
	type link struct {
		at       l4Key
		from, to tracker.Key
	}
	index, want, got := map[tracker.Key]int{}, map[link]bool{}, map[link]bool{}
	for i, c := range d.Changes {
		index[c.Key] = i
	}
	for _, c := range d.Changes {
		for f, to := range c.LostFrontends() {
			w, in := index[to]
			if !in {
				p.t.Fatalf("%s: %s lost %v to %s, which has no change", p.name, c.Key, f, to)
			}
			if n := d.Changes[w].New; n == nil || !slices.ContainsFunc(n.Frontends, func(o Frontend) bool {
				return l4KeyOf(n, &o) == l4KeyOf(&Port{Key: c.Key}, &f)
			}) {
				p.t.Fatalf("%s: %s lost %v to %s, which does not have it", p.name, c.Key, f, to)
			}
			want[link{l4KeyOf(&Port{Key: c.Key}, &f), c.Key, to}] = true
		}
		for f, from := range c.TakenFrontends() {
			p.moved++
			got[link{l4KeyOf(c.New, &f), from, c.Key}] = true
		}
	}
	if !maps.Equal(got, want) {
		p.t.Fatalf("%s: taken %v, lost %v", p.name, got, want)
	}
	// Independent of the implementation of link: the losing Service may come first
	// only if it takes a frontend from the gaining one in turn, perhaps through
	// others.
	reaches := func(a, b tracker.Key) bool {
		seen := map[tracker.Key]bool{}
		var walk func(k tracker.Key) bool
		walk = func(k tracker.Key) bool {
			if k == b {
				return true
			}
			if seen[k] {
				return false
			}
			seen[k] = true
			for l := range want {
				if l.to == k && walk(l.from) {
					return true
				}
			}
			return false
		}
		return walk(a)
	}
	for l := range want {
		if index[l.to] < index[l.from] {
			continue
		}
		p.swapped++
		if !reaches(l.from, l.to) {
			p.t.Fatalf("%s: %s, which takes a frontend from %s, comes after it", p.name, l.to, l.from)
		}
	}
	if len(want) == 0 && !d.Full && !slices.IsSortedFunc(d.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) }) {
		p.t.Fatalf("%s: not sorted", p.name)
	}
}

// plan lists the writes for a delta in the safe order.
func (p *plane) plan(d *Delta) []op {
	var ops []op
	if d.Full && p.prunes {
		live := map[l4Key]bool{}
		liveIDs := map[uint32]map[netip.AddrPort]bool{}
		for _, c := range d.Changes {
			if c.New == nil {
				continue
			}
			for i := range c.New.Frontends {
				live[l4KeyOf(c.New, &c.New.Frontends[i])] = true
			}
			liveIDs[c.New.ID] = map[netip.AddrPort]bool{}
			for _, ep := range c.New.Selection.Reachable {
				liveIDs[c.New.ID][ep.Addr] = true
			}
		}
		ops = append(ops, op{do: func() {
			maps.DeleteFunc(p.fronts, func(at l4Key, _ owned) bool { return !live[at] })
			maps.DeleteFunc(p.pools, func(k poolKey, _ string) bool { return liveIDs[k.id] == nil })
			maps.DeleteFunc(p.eps, func(k epKey, _ *tracker.Endpoint) bool { return !liveIDs[k.id][k.addr] })
			maps.DeleteFunc(p.ids, func(id uint32, _ tracker.Key) bool { return liveIDs[id] == nil })
		}})
	}
	for _, c := range d.Changes {
		for f := range c.GoneFrontends() {
			ops = append(ops, op{c.Key, func() { delete(p.fronts, l4KeyOf(&Port{Key: c.Key}, &f)) }})
		}
		if c.Fields == FieldAll {
			ops = append(ops, op{c.Key, func() { p.clean(c) }})
		}
	}
	for _, c := range d.Changes {
		if c.New == nil {
			continue
		}
		ops = append(ops, op{c.Key, func() {
			if k, ok := p.ids[c.New.ID]; ok && k != c.Key {
				p.t.Fatalf("%s: id %d of %s assigned to %s", p.name, c.New.ID, k, c.Key)
			}
			p.ids[c.New.ID] = c.Key
		}})
		for ep := range c.Upserted() {
			if had := endpointAt(c.Old, ep.Addr); c.Fields != FieldAll && had.Equal(ep) {
				p.t.Fatalf("%s: %s: %s is upserted without a change", p.name, c.Key, ep)
			}
			ops = append(ops, op{c.Key, func() { p.eps[epKey{c.New.ID, ep.Addr}] = ep }})
		}
		for target, field := range map[Target]Field{TargetCluster: FieldCluster | FieldPools, TargetLocal: FieldLocal | FieldPools} {
			if c.Fields&field != 0 {
				ops = append(ops, op{c.Key, func() { setPool(p.pools, c.New, target) }})
			}
		}
	}
	for _, c := range d.Changes {
		if c.New != nil && c.Fields&FieldFrontends != 0 {
			for i, f := range c.New.Frontends {
				ops = append(ops, op{c.Key, func() { p.fronts[l4KeyOf(c.New, &c.New.Frontends[i])] = front(c.New, f) }})
			}
		}
	}
	for _, c := range d.Changes {
		for ep := range c.Removed() {
			if endpointAt(c.New, ep.Addr) != nil {
				p.t.Fatalf("%s: %s: %s is removed and wanted", p.name, c.Key, ep)
			}
			ops = append(ops, op{c.Key, func() { delete(p.eps, epKey{c.ID(), ep.Addr}) }})
		}
		if c.New == nil {
			ops = append(ops, op{c.Key, func() {
				delete(p.ids, c.ID())
				delete(p.pools, poolKey{c.ID(), TargetCluster})
				delete(p.pools, poolKey{c.ID(), TargetLocal})
			}})
		}
	}
	return ops
}

// endpointAt returns the reachable endpoint at an address, or nil.
func endpointAt(s *Port, at netip.AddrPort) *tracker.Endpoint {
	if s == nil {
		return nil
	}
	for _, ep := range s.Selection.Reachable {
		if ep.Addr == at {
			return ep
		}
	}
	return nil
}

// clean removes the parts of earlier attempts that c does not ask for. A frontend that moves stays for
// the Service that takes it.
func (p *plane) clean(c Change) {
	keep, eps := map[l4Key]bool{}, map[netip.AddrPort]bool{}
	if c.New != nil {
		for i := range c.New.Frontends {
			keep[l4KeyOf(c.New, &c.New.Frontends[i])] = true
		}
		for _, ep := range c.New.Selection.Reachable {
			eps[ep.Addr] = true
		}
	}
	for f := range c.LostFrontends() {
		keep[l4KeyOf(&Port{Key: c.Key}, &f)] = true
	}
	maps.DeleteFunc(p.fronts, func(at l4Key, o owned) bool { return o.id == c.ID() && !keep[at] })
	maps.DeleteFunc(p.eps, func(k epKey, _ *tracker.Endpoint) bool { return k.id == c.ID() && !eps[k.addr] })
}

func (p *plane) accept(d *Delta, failed map[tracker.Key]error) {
	p.node, p.gen, p.needFull = d.Node, d.Gen, false
	unsure := func(c *Change) bool {
		unsure := failed[c.Key] != nil
		for _, to := range c.LostFrontends() {
			unsure = unsure || failed[to] != nil
		}
		return unsure
	}
	removeTakenFrontends(p.acked, d, unsure, func(c *Change) bool { return !unsure(c) })
	for i := range d.Changes {
		c := &d.Changes[i]
		p.failed[c.Key] = unsure(c)
		switch {
		case unsure(c):
		case c.New == nil:
			delete(p.acked, c.Key)
		default:
			p.acked[c.Key] = c.New
		}
	}
}

var errInjected = errors.New("injected failure")

func (p *plane) Apply(_ context.Context, d *Delta) error {
	p.check(d)
	ops := p.plan(d)
	if p.during != nil {
		p.during()
	}
	if p.r.IntN(100) >= p.failures {
		for _, o := range ops {
			o.do()
		}
		p.accept(d, nil)
		return nil
	}
	fails := func() { // in the middle, or before the first write
		for _, o := range ops[:p.r.IntN(len(ops)+1)] {
			o.do()
		}
		p.needFull = d.Full
		for i := range d.Changes {
			p.failed[d.Changes[i].Key] = true
		}
	}
	switch p.r.IntN(5) {
	case 0, 1: // some Services fail, each somewhere in the middle
		failed := map[tracker.Key]error{}
		left := map[tracker.Key]int{}
		for _, c := range d.Changes {
			if p.r.IntN(2) == 0 {
				failed[c.Key], left[c.Key] = errInjected, p.r.IntN(8)
			}
		}
		for _, o := range ops {
			if failed[o.key] != nil {
				if left[o.key]--; left[o.key] < 0 {
					continue
				}
			}
			o.do()
		}
		p.accept(d, failed)
		return fmt.Errorf("wrapped: %w", &PartialError{Failed: failed})
	case 2:
		fails()
		return errInjected
	case 3:
		fails()
		panic(errInjected)
	default: // everything is lost
		clear(p.fronts)
		clear(p.pools)
		clear(p.eps)
		clear(p.ids)
		p.needFull = true
		for i := range d.Changes {
			p.failed[d.Changes[i].Key] = true
		}
		return fmt.Errorf("wrapped: %w", ErrNeedFull)
	}
}

// attach attaches the plane and a follower.
func (p *plane) attach(e *Engine) (*Cursor, *follower) {
	b := Backend(p)
	if p.gated != 0 {
		b = Gate(p, func(context.Context, Change) error {
			if p.r.IntN(100) < p.gated {
				return errInjected
			}
			return nil
		})
	}
	c := e.AttachPart(p.name, b, p.serves)
	return c, follow(p.t, p.r, c)
}

// partOf returns the part of a snapshot with the Services for which serves returns true.
func partOf(s *Snapshot, serves func(*Port) bool) *Snapshot {
	if serves == nil {
		return s
	}
	part := &Snapshot{Gen: s.Gen, Node: s.Node}
	for _, svc := range s.Ports {
		if serves(svc) {
			part.Ports = append(part.Ports, svc)
		}
	}
	return part
}

// drift loses entries, as if another program deleted them, and gains a stale one if p prunes.
func (p *plane) drift() {
	maps.DeleteFunc(p.fronts, func(l4Key, owned) bool { return p.r.IntN(3) == 0 })
	maps.DeleteFunc(p.pools, func(poolKey, string) bool { return p.r.IntN(3) == 0 })
	maps.DeleteFunc(p.eps, func(epKey, *tracker.Endpoint) bool { return p.r.IntN(3) == 0 })
	if stale := netip.MustParseAddrPort("198.51.100.1:1"); p.prunes {
		p.fronts[l4KeyAt(stale.Addr(), 1, v1.ProtocolTCP)] = owned{1, "stale"}
		p.eps[epKey{1, stale}] = endpoint(stale.String(), "n1")
	}
}

// checkAcked compares the maps with what c says is in effect. Only Services that failed may have anything else.
func (p *plane) checkAcked(c *Cursor) {
	p.t.Helper()
	if p.needFull {
		return
	}
	rest, in := *p, &Snapshot{Node: p.node}
	unsure := map[uint32]bool{}
	for k, failed := range p.failed {
		if failed {
			unsure[c.engine.find(k)] = true
		}
	}
	for k := range p.acked {
		if s := c.Port(k); s == nil {
			p.t.Fatalf("%s: %s is not in effect", p.name, k)
		} else if !unsure[s.ID] {
			in.Ports = append(in.Ports, s)
		}
	}
	rest.fronts, rest.pools, rest.eps, rest.ids, rest.acked = maps.Clone(p.fronts), maps.Clone(p.pools), maps.Clone(p.eps), maps.Clone(p.ids), maps.Clone(p.acked)
	maps.DeleteFunc(rest.fronts, func(_ l4Key, o owned) bool { return unsure[o.id] })
	maps.DeleteFunc(rest.pools, func(k poolKey, _ string) bool { return unsure[k.id] })
	maps.DeleteFunc(rest.eps, func(k epKey, _ *tracker.Endpoint) bool { return unsure[k.id] })
	maps.DeleteFunc(rest.ids, func(id uint32, _ tracker.Key) bool { return unsure[id] })
	maps.DeleteFunc(rest.acked, func(_ tracker.Key, s *Port) bool { return unsure[s.ID] })
	rest.compare(in)
}

// compare compares the maps with a snapshot.
func (p *plane) compare(s *Snapshot) {
	p.t.Helper()
	want := newPlane(p.t, nil, "", false, 0)
	for _, svc := range s.Ports {
		want.ids[svc.ID] = svc.Key
		want.acked[svc.Key] = svc
		for i, f := range svc.Frontends {
			at := l4KeyOf(svc, &svc.Frontends[i])
			if _, twice := want.fronts[at]; twice {
				p.t.Fatalf("%v belongs to two services", at)
			}
			want.fronts[at] = front(svc, f)
		}
		for _, ep := range svc.Selection.Reachable {
			want.eps[epKey{svc.ID, ep.Addr}] = ep
		}
		setPool(want.pools, svc, TargetCluster)
		setPool(want.pools, svc, TargetLocal)
	}
	if len(want.ids) != len(s.Ports) || len(want.acked) != len(s.Ports) {
		p.t.Fatal("services share an id or a key")
	}
	if !maps.Equal(p.fronts, want.fronts) {
		p.t.Fatalf("%s: frontends\n got %v\nwant %v", p.name, p.fronts, want.fronts)
	}
	if !maps.Equal(p.pools, want.pools) {
		p.t.Fatalf("%s: pools\n got %v\nwant %v", p.name, p.pools, want.pools)
	}
	if !maps.EqualFunc(p.eps, want.eps, (*tracker.Endpoint).Equal) {
		p.t.Fatalf("%s: endpoints\n got %v\nwant %v", p.name, p.eps, want.eps)
	}
	if !maps.Equal(p.ids, want.ids) {
		p.t.Fatalf("%s: ids\n got %v\nwant %v", p.name, p.ids, want.ids)
	}
	if !maps.EqualFunc(p.acked, want.acked, func(a, b *Port) bool { return diff(a, b) == 0 }) {
		p.t.Fatalf("%s: the accepted Services differ from the snapshot", p.name)
	}
	if p.node != s.Node {
		p.t.Fatalf("%s: node", p.name)
	}
}

// objects holds the current API objects of a random world.
type objects struct {
	r        *rand.Rand
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discovery.EndpointSlice
	node     tracker.NodeInfo
	cidrs    []netip.Prefix
	budget   Budget
}

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// randomService returns a random Service whose addresses and NodePorts other Services
// also use.
func (o *objects) randomService(i int) *v1.Service {
	r := o.r
	four, six := fmt.Sprintf("172.30.0.%d", i+1), fmt.Sprintf("fd00::%d", i+1)
	if r.IntN(20) == 0 {
		four = "172.30.0.1"
	}
	s := service(fmt.Sprintf("s%d", i), four, func(s *v1.Service) {
		s.CreationTimestamp = pick(r, metav1.Time{}, metav1.Unix(1000, 0), metav1.Unix(2000, 0), metav1.Unix(3000, 0))
		s.Spec.Type = pick(r, v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer)
		switch r.IntN(4) {
		case 0:
			s.Spec.ClusterIP, s.Spec.ClusterIPs = six, []string{six}
			s.Spec.IPFamilies = []v1.IPFamily{v1.IPv6Protocol}
		case 1:
			s.Spec.ClusterIPs = []string{four, six}
			s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
		case 2:
			if r.IntN(4) == 0 {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"}
			}
		}
		s.Spec.Ports = nil
		for j := range 1 + r.IntN(2) {
			p := v1.ServicePort{Name: string(rune('p' + j)), Port: pick[int32](r, 80, 443, 30001), Protocol: pick(r, v1.ProtocolTCP, v1.ProtocolTCP, v1.ProtocolUDP)}
			if s.Spec.Type != v1.ServiceTypeClusterIP {
				p.NodePort = pick[int32](r, 30001, 30002, 30003)
			}
			s.Spec.Ports = append(s.Spec.Ports, p)
		}
		if r.IntN(2) == 0 {
			s.Spec.ExternalIPs = []string{pick(r, "192.0.2.1", "192.0.2.2", "172.30.0.2", "203.0.113.1", "192.168.1.1"), pick(r, "2001:db8::1", "203.0.113.1", "2001:db8::9")}
		}
		if s.Spec.Type == v1.ServiceTypeLoadBalancer {
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: pick(r, "203.0.113.1", "203.0.113.2", "192.168.1.1")}, {IP: "2001:db8::2"}}
			if r.IntN(2) == 0 {
				s.Spec.LoadBalancerSourceRanges = []string{pick(r, "10.0.0.0/8", "192.168.0.0/16", "0.0.0.0/0"), "2001:db8::/32"}
			}
		}
		if r.IntN(3) == 0 {
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
		if r.IntN(3) == 0 {
			local := v1.ServiceInternalTrafficPolicyLocal
			s.Spec.InternalTrafficPolicy = &local
		}
		s.Annotations = map[string]string{
			"ext": pick(r, "", "x", "xx"), "local": pick(r, "", "", "", "x"), "hash": pick(r, "", "", "x", "xx"),
		}
		if s.Spec.Type == v1.ServiceTypeLoadBalancer && s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
			s.Spec.HealthCheckNodePort = pick[int32](r, 0, 31001, 30001, 30002)
		}
		if r.IntN(3) == 0 {
			timeout := pick[int32](r, 60, 120)
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &timeout}}
		}
	})
	return s
}

func (o *objects) randomSlice(i, j int) *discovery.EndpointSlice {
	r := o.r
	s := sliceOn(fmt.Sprintf("s%d", i), fmt.Sprint("slice", j))
	six := j%2 == 1
	s.AddressType = discovery.AddressTypeIPv4
	if six {
		s.AddressType = discovery.AddressTypeIPv6
	}
	s.Ports[0].Name = pick(r, ptr("p"), ptr("p"), ptr("q"))
	s.Ports[0].Protocol = pick(r, ptr(v1.ProtocolTCP), ptr(v1.ProtocolTCP), ptr(v1.ProtocolUDP))
	if r.IntN(3) == 0 {
		s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: time.Unix(r.Int64N(1e9)+4e9, 0).UTC().Format(time.RFC3339Nano)}
	}
	for range r.IntN(5) {
		addr := fmt.Sprintf("10.0.%d.%d", i, r.IntN(6))
		if six {
			addr = fmt.Sprintf("fd01::%d:%d", i, r.IntN(6))
		}
		ep := discovery.Endpoint{Addresses: []string{addr}, NodeName: pick(r, nil, ptr("n1"), ptr("n2"))}
		if r.IntN(3) == 0 {
			ep.Conditions = discovery.EndpointConditions{Ready: ptr(r.IntN(2) == 0), Serving: ptr(r.IntN(2) == 0), Terminating: ptr(r.IntN(2) == 0)}
		}
		if r.IntN(2) == 0 {
			ep.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: pick(r, "z1", "z2")}}}
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

// step makes a random change, in both the objects and the tracker.
func (o *objects) step(tr *tracker.Tracker, e *Engine) {
	r := o.r
	const n = 6
	switch r.IntN(21) {
	case 0, 1, 2, 3, 4, 5:
		s := o.randomService(r.IntN(n))
		o.services[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = s
		tr.SetService(s)
	case 6, 7, 8:
		name := types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%d", r.IntN(n))}
		delete(o.services, name)
		tr.DeleteService(name)
	case 9, 10, 11, 12, 13, 14:
		s := o.randomSlice(r.IntN(n), r.IntN(4))
		o.slices[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = s
		tr.SetSlice(s)
	case 15, 16:
		name := types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%d-slice%d", r.IntN(n), r.IntN(4))}
		delete(o.slices, name)
		tr.DeleteSlice(name)
	case 17:
		o.node.Zone = pick(r, "", "z1", "z2")
		tr.SetNode(o.node)
	case 18:
		o.node.Addresses = addrs(pick(r, "10.1.1.1", "192.168.1.1", "1.1.1.1"), "2001:db8::9")[:r.IntN(3)]
		tr.SetNode(o.node)
	case 19:
		o.cidrs = prefixes("172.30.0.0/16", "fd00::/64")[:r.IntN(3)]
		e.SetServiceCIDRs(o.cidrs, nil)
	case 20: // a Service is recreated with nothing changed but its age
		s := o.services[types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%d", r.IntN(n))}]
		if s == nil {
			return
		}
		s = s.DeepCopy()
		s.CreationTimestamp = metav1.Unix(r.Int64N(4)*1000, 0)
		name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		o.services[name] = s
		if r.IntN(2) == 0 {
			tr.DeleteService(name)
		}
		tr.SetService(s)
	}
}

// exchange makes two Services exchange their addresses, or moves an address along a
// row of Services.
func (o *objects) exchange(tr *tracker.Tracker) {
	var names []types.NamespacedName
	for n := range o.services {
		names = append(names, n)
	}
	slices.SortFunc(names, func(a, b types.NamespacedName) int { return strings.Compare(a.Name, b.Name) })
	o.r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	if len(names) < 2 {
		return
	}
	names = names[:2+o.r.IntN(len(names)-1)]
	set := func(s *v1.Service) {
		o.services[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = s
		tr.SetService(s)
	}
	first := o.services[names[0]]
	for i, n := range names {
		s := o.services[n].DeepCopy()
		from := first
		if i+1 < len(names) {
			from = o.services[names[i+1]]
		}
		if o.r.IntN(4) == 0 && i+1 == len(names) {
			delete(o.services, n)
			tr.DeleteService(n)
			continue
		}
		s.Spec, s.Status = *from.Spec.DeepCopy(), *from.Status.DeepCopy()
		set(s)
	}
}

// checkOwners compares the owner of every frontend with that of a simple model, which
// sorts everything that the Services ask for.
func (o *objects) checkOwners(t *testing.T, s *Snapshot) {
	t.Helper()
	type claim struct {
		rank    int
		created int64
		key     tracker.Key
	}
	claims, checks := map[l4Key][]claim{}, map[uint16][]claim{}
	tr, err := tracker.New(tracker.Config{OnService: fromAnnotations})
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	for _, svc := range o.services {
		tr.SetService(svc)
	}
	for _, u := range tr.Take().Updates {
		for _, p := range u.Ports {
			for at, kind := range frontendKeys(p.Port) {
				c := claim{map[Kind]int{KindClusterIP: 0, KindLoadBalancerIP: 1, KindExternalIP: 2}[kind], p.Port.Created.Unix(), p.Port.Key}
				if p.Port.Created.IsZero() {
					c.created = math.MaxInt64
				}
				claims[at] = append(claims[at], c)
				if kind == KindClusterIP {
					checks[p.Port.HealthCheckNodePort] = append(checks[p.Port.HealthCheckNodePort], c)
				}
			}
		}
	}
	delete(checks, 0)
	got := map[l4Key]tracker.Key{}
	for _, svc := range s.Ports {
		for i := range svc.Frontends {
			got[l4KeyOf(svc, &svc.Frontends[i])] = svc.Key
		}
	}
	compare := func(a, b claim) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.created, b.created), a.key.Compare(b.key))
	}
	want := map[l4Key]tracker.Key{}
	owns := map[l4Key]claim{}
	for at, all := range claims {
		owns[at] = slices.MinFunc(all, compare)
	}
	earlier := func(a, b claim) bool {
		a.rank, b.rank = 0, 0
		return compare(a, b) < 0 && a.key.NamespacedName != b.key.NamespacedName
	}
	checked := func(c claim, port uint16) bool {
		return slices.ContainsFunc(checks[port], func(o claim) bool { return earlier(o, c) })
	}
	// nodePort reports whether a NodePort at an address is that of an earlier Service.
	nodePort := func(f tracker.Family, c claim, port uint16, proto v1.Protocol) bool {
		o, ok := owns[nodePortKey(f, port, proto)]
		return ok && earlier(o, c)
	}
	for at, c := range owns {
		addr, tcp := netip.AddrFrom16(at.addr).Unmap(), c.key.Protocol == v1.ProtocolTCP
		switch {
		case addr.IsUnspecified():
			if tcp && checked(c, at.port) {
				continue
			}
		case c.rank != 0 && slices.Contains(s.Node.Info.Addresses, addr):
			if nodePort(c.key.Family, c, at.port, c.key.Protocol) || tcp && checked(c, at.port) {
				continue
			}
		}
		if _, ok := got[at]; !ok && o.budget.Port != 0 {
			continue // the owner had to leave it out
		}
		want[at] = c.key
	}
	if !maps.Equal(got, want) {
		t.Errorf("owners\n got %v\nwant %v", got, want)
	}
	for port, all := range checks {
		for _, c := range all {
			lost := checked(c, port) || nodePort(tracker.IPv4, c, port, v1.ProtocolTCP) || nodePort(tracker.IPv6, c, port, v1.ProtocolTCP)
			if i := slices.IndexFunc(s.Ports, func(p *Port) bool { return p.Key == c.key }); i >= 0 && (s.Ports[i].Spec.HealthCheckNodePort == 0) != lost {
				t.Errorf("%v: health-check node port %d, lost %t", c.key, s.Ports[i].Spec.HealthCheckNodePort, lost)
			}
		}
	}
}

// fresh builds the world again, in another order.
func (o *objects) fresh(t *testing.T) *Snapshot {
	c := modelConfig
	c.Budget = o.budget
	tr, e := world(t, c, tracker.NodeInfo{Name: "n1"})
	var do []func()
	for _, s := range o.services {
		do = append(do, func() { tr.SetService(s) })
	}
	for _, s := range o.slices {
		do = append(do, func() { tr.SetSlice(s) })
	}
	do = append(do, func() { tr.SetNode(o.node) }, func() { e.SetServiceCIDRs(o.cidrs, nil) })
	o.r.Shuffle(len(do), func(i, j int) { do[i], do[j] = do[j], do[i] })
	for _, f := range do {
		f()
	}
	return e.Snapshot()
}

var modelConfig = Config{LocalTraffic: LocalTraffic{Bridge: "cni0"}, NodePortAddresses: NodePortAddresses{primary: true}}

// same compares the result of an engine with that of a new one.
func same(t *testing.T, got, want *Snapshot) {
	t.Helper()
	byKey := func(s *Snapshot) map[tracker.Key]*Port {
		m := map[tracker.Key]*Port{}
		for _, svc := range s.Ports {
			m[svc.Key] = svc
		}
		return m
	}
	g, w := byKey(got), byKey(want)
	for k, s := range g {
		if f := diff(s, w[k]); f != 0 {
			t.Errorf("%s differs from a fresh start: %s\n got %+v\nwant %+v", k, f, s, w[k])
		}
	}
	for k := range w {
		if g[k] == nil {
			t.Errorf("%s is missing", k)
		}
	}
	if !got.Node.Info.Equal(want.Node.Info) || !slices.Equal(got.Node.ServiceCIDRs, want.Node.ServiceCIDRs) ||
		!slices.Equal(got.Node.NodePorts4.Prefixes, want.Node.NodePorts4.Prefixes) {
		t.Errorf("node %+v, want %+v", got.Node, want.Node)
	}
}

// sync calls Sync and reports whether it succeeded. A panic is a failure.
func syncs(t *testing.T, c *Cursor) (ok bool) {
	t.Helper()
	defer func() {
		if r := recover(); r != nil && r != errInjected {
			panic(r)
		}
	}()
	var partial *PartialError
	err := c.Sync(context.Background())
	if err != nil && !errors.Is(err, errInjected) && !errors.Is(err, ErrNeedFull) && !errors.As(err, &partial) {
		t.Fatal(err)
	}
	return err == nil
}

// checkInvariants checks the equations at the fields of Cursor.
func checkInvariants(t *testing.T, c *Cursor) {
	t.Helper()
	e := c.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	listed, owners := map[uint32]int{}, map[l4Key]tracker.Key{}
	for _, id := range c.dirty {
		listed[id]++
	}
	for i := range c.states {
		id, s := uint32(i), &c.states[i]
		_, failed := c.failures[id]
		if want := s.acked != nil || failed; s.held != want && !(c.full && s.held) {
			t.Fatalf("%s: %d: held is %t, want %t", c.name, id, s.held, want)
		}
		if c.node == nil && s.acked != nil {
			t.Fatalf("%s: %d is acknowledged without a node", c.name, id)
		}
		for j := 0; s.acked != nil && j < len(s.acked.Frontends); j++ {
			at := l4KeyOf(s.acked, &s.acked.Frontends[j])
			if owner, twice := owners[at]; twice {
				t.Fatalf("%s: %v belongs to %s and %s", c.name, at, owner, s.acked.Key)
			}
			owners[at] = s.acked.Key
		}
		for _, f := range c.followers {
			if f.unlimited(id) != s.acked {
				t.Fatalf("%s: %d: a follower wants %v, acknowledged is %v", c.name, id, f.unlimited(id), s.acked)
			}
		}
		if s.since > c.marks {
			t.Fatalf("%s: %d is dirty since %d of %d", c.name, id, s.since, c.marks)
		}
		if c.full {
			continue
		}
		if want := map[bool]int{true: 1}[s.dirty]; listed[id] != want {
			t.Fatalf("%s: %d is listed %d times, want %d", c.name, id, listed[id], want)
		}
		if !s.dirty && (failed || diff(s.acked, c.desired(id)) != 0) {
			t.Fatalf("%s: %d is not dirty: it failed: %t, acknowledged %v, wanted %v", c.name, id, failed, s.acked, c.desired(id))
		}
	}
	for id := range e.slots {
		n := 0
		var all func(list []*Cursor)
		all = func(list []*Cursor) {
			for _, c := range list {
				if id < len(c.states) && c.states[id].held {
					n++
				}
				all(c.followers)
			}
		}
		if all(e.cursors); int(e.slots[id].holders) != n {
			t.Fatalf("%d has %d holders, want %d", id, e.slots[id].holders, n)
		}
	}
	for id := range c.cut {
		if c.unlimited(id) == nil {
			t.Fatalf("%s: %d exceeds a limit and is not wanted", c.name, id)
		}
	}
	if len(c.triggers) > maxTriggers {
		t.Fatalf("%s: %d triggers", c.name, len(c.triggers))
	}
}

// TestPlanesMatchRuleset runs model data planes that fail in every way through random
// events. After each successful Sync the plane must equal the ruleset, and the
// ruleset must equal that of a new engine with the same objects.
func TestPlanesMatchRuleset(t *testing.T) {
	worlds, steps := 120, 120
	if !testtime.Thorough() {
		worlds = 40
	}
	succeeded, moved, swapped := 0, 0, 0
	for seed := range uint64(worlds) {
		r := rand.New(rand.NewPCG(seed, 1))
		o := &objects{
			r: r, services: map[types.NamespacedName]*v1.Service{}, slices: map[types.NamespacedName]*discovery.EndpointSlice{},
			node: tracker.NodeInfo{Name: "n1"},
		}
		if seed%2 == 1 {
			// Services are cut, and Syncs have several deltas.
			o.budget = Budget{Port: 4 + r.IntN(8), Namespace: r.IntN(100), Delta: 3 + r.IntN(6)}
		}
		c := modelConfig
		c.Budget = o.budget
		tr, e := world(t, c, o.node)
		planes := []*plane{
			newPlane(t, r, "steady", true, 0), newPlane(t, r, "prunes", true, 50), newPlane(t, r, "relies", false, 50), newPlane(t, r, "gated", false, 20),
			newPlane(t, r, "plain part", false, 40), newPlane(t, r, "extended part", true, 40),
		}
		planes[3].gated = 20
		planes[4].serves = func(s *Port) bool { return s.Spec.Ext == nil }
		planes[5].serves = func(s *Port) bool { return s.Spec.Ext != nil }
		var cursors []*Cursor
		var followers []*follower
		for _, p := range planes {
			c, f := p.attach(e)
			cursors, followers = append(cursors, c), append(followers, f)
		}
		for range steps {
			for range 1 + r.IntN(4) {
				if seed%4 != 0 && r.IntN(3) == 0 {
					o.exchange(tr)
				} else {
					o.step(tr, e)
				}
			}
			i := r.IntN(len(planes))
			if r.IntN(20) == 0 {
				cursors[i].Resync()
				planes[i].needFull = true
				planes[i].drift()
			}
			if r.IntN(40) == 0 {
				cursors[i].Detach()
				if err := cursors[i].Sync(t.Context()); !errors.Is(err, ErrDetached) {
					t.Fatalf("sync of a detached cursor: %v", err)
				}
				p := planes[i]
				planes[i] = newPlane(t, r, p.name, p.prunes, p.failures)
				planes[i].serves, planes[i].gated = p.serves, p.gated
				cursors[i], followers[i] = planes[i].attach(e)
			}
			// The world changes during Apply.
			before, moved := e.Snapshot(), false
			planes[i].during = nil
			if o.budget.Delta == 0 && r.IntN(4) == 0 {
				planes[i].during = func() {
					// After ErrNeedFull this is the second Apply.
					before, moved = e.Snapshot(), true
					o.step(tr, e)
					e.Snapshot()
				}
			}
			had := succeeded
			if syncs(t, cursors[i]) {
				succeeded++
				planes[i].compare(partOf(before, planes[i].serves))
			}
			checkInvariants(t, cursors[i])
			planes[i].checkAcked(cursors[i])
			if !moved {
				planes[i].checkStatus(cursors[i], partOf(before, planes[i].serves), succeeded != had, o.budget.Delta != 0)
			}
			if r.IntN(3) == 0 {
				followers[i].sync(t)
				checkInvariants(t, followers[i].cursor)
				followers[i].checkAcked(followers[i].cursor)
			}
			if r.IntN(3) == 0 {
				checkEffect(t, cursors[i], planes[i].acked)
			}
			if !moved && r.IntN(10) == 0 {
				same(t, before, o.fresh(t))
				o.checkOwners(t, before)
			}
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		same(t, e.Snapshot(), o.fresh(t))
		for i := range planes {
			planes[i].failures, planes[i].gated, planes[i].during, followers[i].failures = 0, -planes[i].gated, nil, 0
			if !syncs(t, cursors[i]) {
				t.Fatal("an Apply without failing writes failed")
			}
			planes[i].compare(partOf(e.Snapshot(), planes[i].serves))
			followers[i].sync(t)
			moved, swapped = moved+planes[i].moved, swapped+planes[i].swapped
		}

		// After everything is removed and accepted, the engine is empty.
		for name := range o.services {
			tr.DeleteService(name)
		}
		for i := range planes {
			if !syncs(t, cursors[i]) {
				t.Fatal("an Apply without failing writes failed")
			}
			planes[i].compare(partOf(e.Snapshot(), planes[i].serves))
			followers[i].sync(t)
		}
		if len(e.names)+len(e.gone)+len(e.restricted)+len(e.ownership.owner)+len(e.ownership.conflicts)+len(e.uses.owner)+len(e.uses.conflicts)+len(e.jobs) != 0 || e.ports != 0 || e.endpoints != 0 {
			t.Errorf("seed %d: left behind: %d names, %d gone, %d restricted, %d frontends, %d conflicts, %d ports, %d endpoints",
				seed, len(e.names), len(e.gone), len(e.restricted), len(e.ownership.owner), len(e.ownership.conflicts), e.ports, e.endpoints)
		}
		if ad := &e.admission; ad.wanted != 0 || len(ad.refused) != 0 || len(ad.namespaces) != 0 {
			t.Errorf("seed %d: %d elements in use, %d ports wait, %d namespaces", seed, ad.wanted, len(ad.refused), len(ad.namespaces))
		}
		if len(e.free) != len(e.slots)-1 {
			t.Errorf("seed %d: %d of %d ids are free", seed, len(e.free), len(e.slots)-1)
		}
		for _, c := range cursors {
			checkEffect(t, c, nil)
			if len(c.dirty)+len(c.effect.shared)+len(c.failures) != 0 {
				t.Errorf("seed %d: %s: %d dirty, %d failures", seed, c.name, len(c.dirty), len(c.failures))
			}
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	t.Logf("%d frontends moved, %d of them in a circle", moved, swapped)
	if moved < 20*worlds || swapped < worlds/2 {
		t.Errorf("%d frontends moved, %d of them in a circle: too few for this test", moved, swapped)
	}
	if succeeded < worlds*steps/4 {
		t.Errorf("only %d syncs succeeded, too few for this test", succeeded)
	}
}
