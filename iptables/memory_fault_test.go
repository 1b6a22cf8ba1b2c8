package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// inMemory runs a test with each flavor of a kernel in memory.
func inMemory(t *testing.T, f func(t *testing.T, r *rig, m *memory)) {
	for _, flavor := range []Flavor{NFT, Legacy} {
		t.Run(string(flavor), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, system{flavor, true})
			f(t, r, r.node.(*memory))
		})
	}
}

// TestLackOfMemoryIsNoRefusal makes iptables-restore fail before it reads its input. The backend must try once.
func TestLackOfMemoryIsNoRefusal(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		for round, reason := range []string{"Memory allocation problem", "No buffer space available"} {
			short := &CommandError{Program: "memory-restore", Status: 4, Message: "Could not fetch rule set generation id: " + reason}
			writes := 0
			for f := range m.tables {
				m.tables[f].Before = func(string) error { writes++; return short }
			}
			for i := range 30 {
				r.set(i, []int{i, i + round + 1})
			}
			var refused *ruleset.PartialError
			if err := r.cursor.Sync(t.Context()); err == nil || errors.As(err, &refused) || writes > 2 {
				t.Errorf("%s: %d writes, error %v", reason, writes, err)
			}
			for f := range m.tables {
				m.tables[f].Before = nil
			}
			r.sync()
			r.verify()
		}
		short := &CommandError{Program: "memory-restore", Status: 4, Message: "Could not fetch rule set generation id: Memory allocation problem"}
		m.tables[tracker.IPv4].Before = func(string) error { return short }
		if err := r.probe(); err == nil || errors.Is(err, dataplane.ErrUnsupported) {
			t.Errorf("probe: %v", err)
		}
	})
}

// TestTablesHaveWhatModelHolds changes Services that take frontends from each other, in circles, too, while
// inputs are refused, too large, meet a lock, or are killed. After each Sync the tables must have what
// the model holds, and after one without an error what the Engine has.
func TestTablesHaveWhatModelHolds(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		const n = 12
		rng := rand.New(rand.NewPCG(*backendtest.Seed, 12))
		for _, f := range r.backend.families {
			f.limit = 150 // a few parts
		}
		order := rng.Perm(n)
		set := func(i int) {
			if rng.IntN(8) == 0 {
				r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: svc(i).Name})
				return
			}
			edits := []func(*v1.Service){func(s *v1.Service) {
				at := svc(order[i]).Spec
				s.Spec.ClusterIP, s.Spec.ClusterIPs = at.ClusterIP, at.ClusterIPs
				s.CreationTimestamp = metav1.Unix(1+rng.Int64N(5), 0)
			}}
			for _, edit := range []func(*v1.Service){nodePort(30000 + int32(rng.IntN(n))), externalIPs, affinity(10), externalLocal} {
				if rng.IntN(4) == 0 {
					edits = append(edits, edit)
				}
			}
			r.set(i, rng.Perm(8)[:rng.IntN(5)], edits...)
		}
		fail := func() func(string) error {
			e, left := &CommandError{Program: "memory-restore", Status: 1, Message: "a failure"}, rng.IntN(2)*rng.IntN(4)
			switch rng.IntN(8) {
			case 0, 1, 2:
				e.Status, e.Cause = 4, ErrLocked
			case 3:
				e.Status, e.Cause = -1, context.DeadlineExceeded
			case 4:
				e.Message = "Message too long"
			case 5: // refused
			default:
				return nil
			}
			return func(string) error {
				if left--; left < 0 {
					return e
				}
				return nil
			}
		}
		results := map[string]int{}
		for range 300 {
			if rng.IntN(3) == 0 {
				i, j := rng.IntN(n), rng.IntN(n)
				order[i], order[j] = order[j], order[i]
				set(i)
				set(j)
			}
			for range 1 + rng.IntN(4) {
				set(rng.IntN(n))
			}
			if rng.IntN(15) == 0 {
				r.cursor.Resync()
			}
			for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				if rng.IntN(2) == 0 {
					m.tables[f].Before = fail()
				}
			}
			err := r.cursor.Sync(t.Context())
			for _, tables := range m.tables {
				tables.Before = nil
			}
			var written []*ruleset.Port
			for _, f := range r.backend.families {
				if f.model != nil {
					written = slices.AppendSeq(written, maps.Values(f.model.services))
				}
			}
			switch {
			case err == nil:
				results["done"]++
				r.verify()
			case r.backend.stateUnknown():
				results["unknown"]++
				continue
			default:
				results["failed"]++
			}
			r.verifyServices(written)
		}
		for _, what := range []string{"done", "unknown", "failed"} {
			if results[what] == 0 {
				t.Errorf("no Sync is %s: %v", what, results)
			}
		}
		r.sync()
		r.verify()
	})
}

// TestLostAcknowledgmentIsMended hides from the cursor that a change or a removal is in effect, and then
// changes the Service back to what was acknowledged last, or removes one that never was.
func TestLostAcknowledgmentIsMended(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		lost, full := false, 0
		later := errors.New("a later step failed")
		cursor := r.engine.Attach("wrapper", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
			if d.Full {
				full++
			}
			err := r.backend.Apply(ctx, d)
			if err == nil && lost {
				err = later
			}
			return err
		}))
		sync := func(want error) {
			t.Helper()
			if err := cursor.Sync(t.Context()); !errors.Is(err, want) {
				t.Fatalf("%v, want %v", err, want)
			}
		}
		r.set(0, []int{1}, nodePort(30000))
		sync(nil)
		want := m.lines(tracker.IPv4)
		for _, change := range []func(){
			func() { r.set(0, []int{2, 3}, nodePort(30001)) },
			func() { r.tracker.DeleteService(backendtest.ServiceName(0)) },
			func() { r.set(1, []int{4}, nodePort(30001)) },
		} {
			lost = true
			change()
			sync(later)
			if slices.Equal(m.lines(tracker.IPv4), want) {
				t.Fatal("the change is not in effect")
			}
			lost = false
			r.set(0, []int{1}, nodePort(30000))
			r.tracker.DeleteService(backendtest.ServiceName(1))
			sync(nil)
			if now := m.lines(tracker.IPv4); !slices.Equal(now, want) {
				t.Errorf("the tables have\n%s\nwant\n%s", strings.Join(now, "\n"), strings.Join(want, "\n"))
			}
		}
		if full != 1 {
			t.Errorf("%d full deltas, want the first", full)
		}
	})
}

// TestFrontendsMoveInOneStep exchanges the cluster IPs of Services again and again, after
// failures, which are written one by one. Each cluster IP must be forwarded after every input.
func TestFrontendsMoveInOneStep(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		const n = 6
		tables := m.tables[tracker.IPv4]
		rng := rand.New(rand.NewPCG(5, 5))
		order := rng.Perm(n)
		set := func() {
			for i, at := range order {
				s := svc(i)
				s.Spec.ClusterIP, s.Spec.ClusterIPs = svc(at).Spec.ClusterIP, svc(at).Spec.ClusterIPs
				r.tracker.SetService(s)
			}
		}
		for i := range n {
			r.setEndpoints(i, 10*i+1, 10*i+2)
		}
		set()
		r.sync()
		locked := &CommandError{Program: "memory-restore", Status: 4, Cause: ErrLocked}
		for range 20 {
			tables.Before = func(string) error { return locked }
			for range 2 {
				order = rng.Perm(n)
				set()
				if err := r.cursor.Sync(t.Context()); !errors.Is(err, ErrLocked) {
					t.Fatal(err)
				}
			}
			tables.Before = nil
			tables.After = func(string) error {
				for i := range n {
					p := ruleset.Packet{From: netip.MustParseAddr("192.0.2.9"), Protocol: v1.ProtocolTCP, InInterface: "eth0"}
					p.To = netip.AddrPortFrom(netip.MustParseAddr(svc(i).Spec.ClusterIP), 80)
					if out := tables.Handle(p); out.Action != ruleset.ActionForward {
						t.Errorf("%s: %v", p.To, out)
					}
				}
				return nil
			}
			r.sync()
			tables.After = nil
			r.verify()
			if t.Failed() {
				return
			}
		}
	})
}

// TestForeignChangesAreRepaired alters the tables at random. A full delta must repair
// everything and leave what belongs to others.
func TestForeignChangesAreRepaired(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		rng := rand.New(rand.NewPCG(9, 9))
		r.everyKind()
		for i := range firstRules + 20 {
			r.set(100+i, upTo(1+i%3))
		}
		r.sync()
		r.command(tracker.IPv4, "", "-t", "nat", "-N", "OTHER")
		r.command(tracker.IPv4, "", "-t", "nat", "-A", "OTHER", "-j", "RETURN")
		noticed := 0
		for i := range 40 {
			if i%4 == 0 { // the chains of Services, which Check does not read, are the most
				r.command(tracker.IPv4, "", "-t", "nat", "-F", []string{"KUBE-POSTROUTING", "PREROUTING"}[i/4%2])
			}
			for range 1 + rng.IntN(3) {
				table := []string{"nat", "filter"}[rng.IntN(2)]
				l := r.kernel(tracker.IPv4)
				names := slices.DeleteFunc(slices.Sorted(maps.Keys(l)), func(k string) bool {
					return !strings.HasPrefix(k, table+" ") || k == "nat OTHER"
				})
				_, name, _ := strings.Cut(names[rng.IntN(len(names))], " ")
				switch rules := len(l[table+" "+name]); {
				case rng.IntN(3) == 0:
					r.command(tracker.IPv4, "", "-t", table, "-F", name)
				case rules == 0 || rng.IntN(2) == 0:
					if strings.HasPrefix(name, "KUBE-") {
						r.command(tracker.IPv4, "", "-t", table, "-I", name, "1", "-s", "203.0.113.9", "-j", "DROP")
					}
				default:
					r.command(tracker.IPv4, "", "-t", table, "-D", name, fmt.Sprint(1+rng.IntN(rules)))
				}
			}
			var drift *dataplane.DriftError
			if err := r.backend.Check(context.Background()); errors.As(err, &drift) {
				noticed++
			} else if err != nil {
				t.Fatal(err)
			}
			r.cursor.Resync()
			r.sync()
			r.verifyBut("nat OTHER")
		}
		if noticed < 8 { // with iptables-legacy, an alteration of the same size is noticed after minutes
			t.Errorf("Check noticed %d of 40 alterations, and 10 are of chains that it reads", noticed)
		}
	})
}

// TestConnectionsOfDeletedServicesAreForgotten counts connections of a Service that loses its
// endpoints and then is deleted.
func TestConnectionsOfDeletedServicesAreForgotten(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		r.config.CountTraffic = true
		r.start()
		r.set(0, []int{1, 2})
		r.set(1, []int{3}, nodePort(30001), externalLocal)
		r.sync()
		f := r.backend.families[0]
		var pools []*chain
		for _, s := range r.engine.Snapshot().Ports {
			if s.Key.Family != tracker.IPv4 {
				continue
			}
			out := f.model.render(s)
			for i := range out.chains {
				if isPoolChain(out.chains[i].name) {
					pools = append(pools, &out.chains[i])
				}
			}
		}
		b := newBatch()
		for _, c := range pools {
			c.begin(connections{5, 300})
			b.put(*c)
		}
		if out := f.write(t.Context(), b.inputs(nat, nil, 1000, nil)...); out.err != nil {
			t.Fatal(out.err)
		}
		counts := func() (n [2]uint64) {
			t.Helper()
			got := must.Get(r.backend.Traffic(t.Context()))(t)
			for k, c := range got.Services {
				for i := range n {
					if k.Name == svc(i).Name && k.Family == tracker.IPv4 && k.Protocol == v1.ProtocolTCP {
						n[i] += c.Connections
					}
				}
			}
			return n
		}
		if got := counts(); got != [2]uint64{5, 10} { // the second has two pools
			t.Errorf("at first %v", got)
		}
		if read, err := r.traffic(); err != nil || len(read.Services) != 2 {
			t.Errorf("Traffic: %v, %v", read, err)
		}
		for _, endpoints := range [][]int{{1}, nil, {7, 8}, nil} {
			r.setEndpoints(0, endpoints...)
			r.sync()
			if got := counts(); got != [2]uint64{5, 10} {
				t.Errorf("with endpoints %v: %v", endpoints, got)
			}
		}
		r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: svc(0).Name})
		r.sync()
		if got := counts(); got != [2]uint64{0, 10} || len(f.kept) != 0 {
			t.Errorf("after the deletion: %v, %v is kept", got, f.kept)
		}
	})
}
