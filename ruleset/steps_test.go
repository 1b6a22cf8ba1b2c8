package ruleset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// stepPlane is a data plane that applies deltas exactly by the numbered steps of the
// package documentation. It writes one entry at a time, any write may fail, and it
// rewrites only the parts in Field. After every write it checks each frontend that
// the plane served when Apply began and that the ruleset still wants: it must be
// served.
type stepPlane struct {
	t    *testing.T
	r    *rand.Rand
	name string
	// owners: the key of a frontend's entry contains its Service, so two Services can
	// have entries for one address. Without owners there is one entry per address,
	// and writing replaces it.
	owners bool
	// failures is the percentage of Applies that fail.
	failures int

	fronts map[entryKey]entry
	// counts holds the sizes of both pools with each frontend.
	counts map[entryKey][2]int
	// pools holds the pools that exist, which may be empty.
	pools map[poolKey]string
	// Each map below holds the part of one Field bit, by Service.
	ids                                         map[uint32]tracker.Key
	affinity, hash, ext, known, other, policies map[uint32]string

	acked map[tracker.Key]*Port
	// left holds what is in effect of the Services that this Apply refuses, and of those that lose
	// a frontend to them.
	left []*Port
	// refuses: it refuses Services, unless they have failed before, instead of failing.
	refuses bool
	refused int
	// keep holds the frontends that must be served during this Apply.
	keep map[l4Key]bool
	// moved counts takeovers, swapped the takeovers in a circle.
	moved, swapped int
}

// entryKey is the key of a frontend's entry. owner is 0 without owners.
type entryKey struct {
	owner uint32
	at    l4Key
}

type entry struct {
	id           uint32
	key          tracker.Key
	target, near Target
	text         string
}

func newStepPlane(t *testing.T, r *rand.Rand, name string, owners bool, failures int) *stepPlane {
	p := &stepPlane{t: t, r: r, name: name, owners: owners, failures: failures, acked: map[tracker.Key]*Port{}}
	p.clear()
	return p
}

// Limits implements [Limiter].
func (p *stepPlane) Limits(tracker.Family) Limits { return Limits{PortRanges: PortRangesShifted} }

func (p *stepPlane) clear() {
	p.fronts, p.counts, p.pools = map[entryKey]entry{}, map[entryKey][2]int{}, map[poolKey]string{}
	p.ids = map[uint32]tracker.Key{}
	for _, m := range p.tables() {
		*m = map[uint32]string{}
	}
}

func (p *stepPlane) tables() []*map[uint32]string {
	return []*map[uint32]string{&p.affinity, &p.hash, &p.ext, &p.known, &p.other, &p.policies}
}

func (p *stepPlane) keyOf(s *Port, f *Frontend) entryKey {
	k := entryKey{at: l4KeyOf(s, f)}
	if p.owners {
		k.owner = s.ID
	}
	return k
}

// works reports whether an entry is valid: it refers to a non-empty pool of its own
// Service, or refuses connections.
func (p *stepPlane) works(e entry) bool {
	for _, t := range []Target{e.target, e.near} {
		if (t == TargetCluster || t == TargetLocal) && p.pools[poolKey{e.id, t}] == "" {
			return false
		}
	}
	return p.ids[e.id] == e.key
}

func (p *stepPlane) served() map[l4Key]bool {
	out := map[l4Key]bool{}
	for k, e := range p.fronts {
		if p.works(e) {
			out[k.at] = true
		}
	}
	return out
}

// begin records the frontends that must not be missing from now on.
func (p *stepPlane) begin(d *Delta) {
	now := maps.Clone(p.acked)
	for _, c := range d.Changes {
		delete(now, c.Key)
		if c.New != nil {
			now[c.Key] = c.New
		}
	}
	p.keep = map[l4Key]bool{}
	served := p.served()
	for _, s := range now {
		for i := range s.Frontends {
			if at := l4KeyOf(s, &s.Frontends[i]); served[at] {
				p.keep[at] = true
			}
		}
	}
}

// wrote checks that no frontend is missing after a write.
func (p *stepPlane) wrote(what string) {
	p.t.Helper()
	served := p.served()
	for at := range p.keep {
		if !served[at] {
			p.t.Fatalf("%s: %v is not served after %s", p.name, at, what)
		}
	}
}

// checkLinks compares the takeovers of a delta with their definition, and checks the
// order of the changes.
func (p *stepPlane) checkLinks(d *Delta) {
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
				if p.acked[to] == nil || !slices.ContainsFunc(p.acked[to].Frontends, func(o Frontend) bool {
					return l4KeyOf(p.acked[to], &o) == l4KeyOf(&Port{Key: c.Key}, &f)
				}) {
					p.t.Fatalf("%s: %s lost %v to %s, which neither takes it nor has it", p.name, c.Key, f, to)
				}
				continue
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

var errStop = errors.New("stopped")

func (p *stepPlane) Apply(_ context.Context, d *Delta) error {
	p.checkLinks(d)
	for _, c := range d.Changes {
		if diff(c.Old, p.acked[c.Key]) != 0 {
			p.t.Fatalf("%s: %s: Old is not what was accepted", p.name, c.Key)
		}
	}
	p.left = nil
	var refused map[tracker.Key]error
	if p.refuses && !d.second && p.r.IntN(100) < p.failures { // it accepts what may stay
		d, refused = p.refuse(d)
	}
	p.begin(d)
	// The number of writes that still succeed, in total and for each Service that must fail.
	all, left := 1<<30, map[tracker.Key]int{}
	if !p.refuses && p.r.IntN(100) < p.failures {
		switch p.r.IntN(4) {
		case 0, 1:
			for _, c := range d.Changes {
				if p.r.IntN(3) == 0 {
					left[c.Key] = p.r.IntN(8)
				}
			}
		case 2:
			all = p.r.IntN(3 * (len(d.Changes) + 1))
		default:
			p.clear()
			return ErrNeedFull
		}
	}
	failed := map[tracker.Key]error{}
	write := func(c *Change, what string, f func()) error {
		if n, ok := left[c.Key]; ok {
			if n == 0 {
				return errInjected
			}
			left[c.Key]--
		}
		if all--; all < 0 {
			return errStop
		}
		f()
		p.wrote(what + " of " + c.Key.String())
		return nil
	}
	stopped := false
	step := func(f func(c *Change) error) {
		for i := range d.Changes {
			c := &d.Changes[i]
			if failed[c.Key] != nil || stopped {
				continue
			}
			if err := f(c); err != nil {
				failed[c.Key] = err
				stopped = stopped || err == errStop
			}
		}
	}
	differs := func(c *Change, f Field) bool { return c.New != nil && (d.Full || c.Fields&f != 0) }
	targets := []struct {
		target Target
		field  Field
	}{{TargetCluster, FieldCluster | FieldPools}, {TargetLocal, FieldLocal | FieldPools}}
	uses := func(s *Port, t Target) bool {
		return s != nil && (t == TargetCluster && s.Selection.UsesCluster || t == TargetLocal && s.Selection.UsesLocal)
	}

	step(func(c *Change) error { // 3
		for f := range c.GoneFrontends() {
			s := &Port{Key: c.Key, ID: c.ID()}
			if err := write(c, "deleting a gone frontend", func() {
				delete(p.fronts, p.keyOf(s, &f))
				delete(p.counts, p.keyOf(s, &f))
			}); err != nil {
				return err
			}
		}
		return nil
	})
	step(func(c *Change) error { // 4
		if c.New == nil {
			return nil
		}
		s := c.New
		if err := write(c, "naming", func() { p.ids[s.ID] = c.Key }); err != nil {
			return err
		}
		for _, x := range targets {
			if !differs(c, x.field) || len(s.Pool(x.target)) == 0 {
				continue
			}
			if err := write(c, "writing a pool", func() { p.pools[poolKey{s.ID, x.target}] = pool(s, x.target) }); err != nil {
				return err
			}
		}
		for _, x := range []struct {
			field Field
			table map[uint32]string
			value string
		}{
			{FieldAffinity, p.affinity, s.Spec.Affinity.String()},
			{FieldHash, p.hash, fmt.Sprint(s.Hash(), s.Spec.HashBuckets)},
			{FieldExt, p.ext, fmt.Sprint(s.Spec.Ext)},
			{FieldEndpoints, p.known, knownText(s)},
			{FieldOther, p.other, otherText(s)},
			{FieldOther | FieldFrontends, p.policies, policyText(s)},
		} {
			if !differs(c, x.field) {
				continue
			}
			if err := write(c, "writing "+x.field.String(), func() { x.table[s.ID] = x.value }); err != nil {
				return err
			}
		}
		return nil
	})
	step(func(c *Change) error { // 5
		for i := range 2 * len(frontendsOf(c.New)) {
			s, f := c.New, &c.New.Frontends[i/2]
			if i%2 == 0 && differs(c, FieldFrontends) {
				if err := write(c, "writing a frontend", func() { p.fronts[p.keyOf(s, f)] = entryOf(s, f) }); err != nil {
					return err
				}
			}
			if i%2 == 1 && differs(c, FieldFrontends|FieldPools|FieldCluster|FieldLocal) {
				if err := write(c, "writing counts", func() {
					p.counts[p.keyOf(s, f)] = [2]int{len(s.Pool(TargetCluster)), len(s.Pool(TargetLocal))}
				}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if d.Full {
		if len(failed) != 0 { // steps 6 and 7 are left out
			return errInjected
		}
		p.pruneFrontends(d)
	}
	// A Service that loses a frontend to a failed one is not changed.
	waits := func(c *Change) bool {
		for _, to := range c.LostFrontends() {
			if failed[to] != nil {
				return true
			}
		}
		return false
	}
	step(func(c *Change) error { // 6
		if !p.owners || waits(c) {
			return nil
		}
		for f := range c.LostFrontends() {
			s := &Port{Key: c.Key, ID: c.ID()}
			if err := write(c, "deleting a lost frontend", func() {
				delete(p.fronts, p.keyOf(s, &f))
				delete(p.counts, p.keyOf(s, &f))
			}); err != nil {
				return err
			}
		}
		return nil
	})
	step(func(c *Change) error { // 7
		if waits(c) {
			return nil
		}
		for _, x := range targets {
			if c.New != nil && (!differs(c, x.field) || len(c.New.Pool(x.target)) != 0) {
				continue
			}
			if err := write(c, "emptying a pool", func() {
				if uses(c.New, x.target) {
					p.pools[poolKey{c.ID(), x.target}] = ""
				} else {
					delete(p.pools, poolKey{c.ID(), x.target})
				}
			}); err != nil {
				return err
			}
		}
		if c.New != nil {
			return nil
		}
		return write(c, "removing", func() {
			delete(p.ids, c.ID())
			for _, m := range p.tables() {
				delete(*m, c.ID())
			}
		})
	})
	switch {
	case stopped, d.Full && len(failed) != 0:
		return errInjected
	case d.Full:
		p.prune(d)
	}
	unsure := func(c *Change) bool { return failed[c.Key] != nil || waits(c) }
	concede(p.acked, d, unsure, func(c *Change) bool { return !unsure(c) })
	for _, c := range d.Changes {
		if unsure(&c) {
			continue
		}
		if c.New == nil {
			delete(p.acked, c.Key)
		} else {
			p.acked[c.Key] = c.New
		}
	}
	if maps.Copy(failed, refused); len(failed) != 0 {
		return &PartialError{Failed: failed, Pruned: true}
	}
	return nil
}

// refuse returns d without the Services that are refused, and without those that lose a frontend
// to them or to one of those.
func (p *stepPlane) refuse(d *Delta) (rest *Delta, refused map[tracker.Key]error) {
	refused, left := map[tracker.Key]error{}, map[tracker.Key]bool{}
	for _, c := range d.Changes {
		if c.New != nil && p.r.IntN(4) == 0 {
			refused[c.Key], left[c.Key] = ErrRefused, true
		}
	}
	for n := -1; n != len(left); {
		n = len(left)
		for _, c := range d.Changes {
			for _, to := range c.LostFrontends() {
				if left[to] {
					left[c.Key] = true
				}
			}
		}
	}
	if slices.ContainsFunc(d.Changes, func(c Change) bool { return left[c.Key] && len(c.Attempted) != 0 }) {
		return d, nil
	}
	p.refused += len(refused)
	out := *d
	out.Changes = nil
	for _, c := range d.Changes {
		if left[c.Key] {
			stays := c.Staying(func(k tracker.Key) bool { return left[k] })
			if stays == nil {
				continue
			}
			p.left = append(p.left, stays)
			c = Change{Key: c.Key, Old: c.Old, New: stays, Fields: diff(c.Old, stays), lost: c.lost}
		}
		out.Changes = append(out.Changes, c)
	}
	return &out, refused
}

// wanted returns a plane with the contents that a full delta asks for.
func (p *stepPlane) wanted(d *Delta) *stepPlane {
	want := newStepPlane(p.t, p.r, "", p.owners, 0)
	for _, c := range d.Changes {
		if c.New != nil {
			want.add(c.New)
		}
	}
	for _, s := range p.left {
		want.add(s)
	}
	return want
}

// pruneFrontends removes the frontends that a full delta does not ask for.
func (p *stepPlane) pruneFrontends(d *Delta) {
	want := p.wanted(d)
	maps.DeleteFunc(p.fronts, func(k entryKey, _ entry) bool { _, ok := want.fronts[k]; return !ok })
	maps.DeleteFunc(p.counts, func(k entryKey, _ [2]int) bool { _, ok := want.fronts[k]; return !ok })
	p.wrote("pruning frontends")
}

// prune removes everything else that a full delta does not ask for.
func (p *stepPlane) prune(d *Delta) {
	want := p.wanted(d)
	maps.DeleteFunc(p.pools, func(k poolKey, _ string) bool { _, ok := want.pools[k]; return !ok })
	maps.DeleteFunc(p.ids, func(id uint32, _ tracker.Key) bool { _, ok := want.ids[id]; return !ok })
	for _, m := range p.tables() {
		maps.DeleteFunc(*m, func(id uint32, _ string) bool { _, ok := want.ids[id]; return !ok })
	}
	p.wrote("pruning")
}

func frontendsOf(s *Port) []Frontend {
	if s == nil {
		return nil
	}
	return s.Frontends
}

func entryOf(s *Port, f *Frontend) entry {
	return entry{s.ID, s.Key, f.Target, f.Internal, show(*f)}
}

func knownText(s *Port) string {
	var b strings.Builder
	for _, ep := range s.Endpoints {
		fmt.Fprintf(&b, "%+v ", *ep)
	}
	return b.String()
}

func otherText(s *Port) string {
	return fmt.Sprint(s.Spec.HealthCheckNodePort, s.Spec.NeedLocalSet, s.Selection.HasAny, s.Selection.Mode)
}

func policyText(s *Port) string {
	return fmt.Sprint(s.Spec.InternalLocal, s.Spec.ExternalLocal, s.Spec.ClusterIP, s.Spec.ExternalIPs, s.Spec.LoadBalancerIPs, s.Spec.SourceRanges)
}

// add adds a Service in one step.
func (p *stepPlane) add(s *Port) {
	p.ids[s.ID] = s.Key
	for i := range s.Frontends {
		k := p.keyOf(s, &s.Frontends[i])
		p.fronts[k] = entryOf(s, &s.Frontends[i])
		p.counts[k] = [2]int{len(s.Pool(TargetCluster)), len(s.Pool(TargetLocal))}
	}
	if s.Selection.UsesCluster {
		p.pools[poolKey{s.ID, TargetCluster}] = pool(s, TargetCluster)
	}
	if s.Selection.UsesLocal {
		p.pools[poolKey{s.ID, TargetLocal}] = pool(s, TargetLocal)
	}
	p.affinity[s.ID] = s.Spec.Affinity.String()
	p.hash[s.ID] = fmt.Sprint(s.Hash(), s.Spec.HashBuckets)
	p.ext[s.ID] = fmt.Sprint(s.Spec.Ext)
	p.known[s.ID] = knownText(s)
	p.other[s.ID] = otherText(s)
	p.policies[s.ID] = policyText(s)
}

// compare compares the plane with a snapshot.
func (p *stepPlane) compare(s *Snapshot) {
	p.t.Helper()
	want := newStepPlane(p.t, nil, "", p.owners, 0)
	for _, svc := range s.Ports {
		want.add(svc)
	}
	for _, x := range []struct {
		what      string
		same      bool
		got, want any
	}{
		{"frontends", maps.Equal(p.fronts, want.fronts), p.fronts, want.fronts},
		{"counts", maps.Equal(p.counts, want.counts), p.counts, want.counts},
		{"pools", maps.Equal(p.pools, want.pools), p.pools, want.pools},
		{"ids", maps.Equal(p.ids, want.ids), p.ids, want.ids},
	} {
		if !x.same {
			p.t.Fatalf("%s: %s\n got %v\nwant %v", p.name, x.what, x.got, x.want)
		}
	}
	for i, m := range p.tables() {
		if w := *want.tables()[i]; !maps.Equal(*m, w) {
			p.t.Fatalf("%s: table %d\n got %v\nwant %v", p.name, i, *m, w)
		}
	}
}

// steppedWorld returns a tracker whose hooks set fields without an API field.
func steppedWorld(t *testing.T, b Budget) (*tracker.Tracker, *Engine) {
	t.Helper()
	tr, err := tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: "n1"},
		OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			p.NeedLocalSet = s.Annotations["local"] != ""
			p.Hash = tracker.Hash(len(s.Annotations["hash"]))
			return fromAnnotations(s, nil, p)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	c := modelConfig
	c.Source, c.Budget = tr, b
	e, err := NewEngine(c)
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return tr, e
}

// TestStepsKeepFrontendsServed runs planes of both kinds in random worlds where
// Services share and exchange addresses and writes fail. No frontend may be missing
// on the way. After each successful Sync the plane must equal the ruleset.
func TestStepsKeepFrontendsServed(t *testing.T) {
	worlds, steps := 60, 120
	if !testtime.Thorough() {
		worlds = 20
	}
	moved, swapped := 0, 0
	for seed := range uint64(worlds) {
		r := rand.New(rand.NewPCG(seed, 9))
		// In some worlds, most Syncs have several deltas.
		tr, e := steppedWorld(t, Budget{Delta: 4 * int(seed%3)})
		o := &objects{
			r: r, services: map[types.NamespacedName]*v1.Service{}, slices: map[types.NamespacedName]*discovery.EndpointSlice{},
			node: tracker.NodeInfo{Name: "n1"},
		}
		var planes []*stepPlane
		var cursors []*Cursor
		for _, p := range []*stepPlane{
			newStepPlane(t, r, "by address", false, 0), newStepPlane(t, r, "by owner", true, 0),
			newStepPlane(t, r, "by address, failing", false, 60), newStepPlane(t, r, "by owner, failing", true, 60),
			newStepPlane(t, r, "by address, refusing", false, 60), newStepPlane(t, r, "by owner, refusing", true, 60),
		} {
			p.refuses = strings.HasSuffix(p.name, "refusing")
			planes = append(planes, p)
			cursors = append(cursors, e.Attach(p.name, p))
		}
		for step := range steps {
			for range 1 + r.IntN(4) {
				if r.IntN(3) == 0 {
					o.exchange(tr)
				} else {
					o.step(tr, e)
				}
			}
			i := r.IntN(len(planes))
			if r.IntN(30) == 0 {
				cursors[i].Resync()
			}
			before := e.Snapshot()
			if syncs(t, cursors[i]) {
				planes[i].compare(before)
			}
			if seed%2 == 0 {
				checkEffect(t, cursors[i], planes[i].acked)
			}
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
		}
		for i, p := range planes {
			p.failures = 0
			if !syncs(t, cursors[i]) {
				t.Fatal("an Apply without failing writes failed")
			}
			p.compare(e.Snapshot())
			moved, swapped = moved+p.moved, swapped+p.swapped
		}
	}
	t.Logf("%d frontends moved, %d of them in a circle", moved, swapped)
	if moved < 20*worlds || swapped < worlds {
		t.Errorf("%d frontends moved, %d of them in a circle: too few for this test", moved, swapped)
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
