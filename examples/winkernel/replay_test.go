package winkernel_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

var worlds = flag.String("worlds", testdata, "folder of worlds to replay")

// testdata is the folder of the recorded worlds, and testdataSteps the number of their steps with an
// expectation, which the package documentation tells.
const (
	testdata      = "testdata/worlds"
	testdataSteps = 454
)

// TestWorlds replays recorded worlds. After each step the service must have the expected state,
// and no frontend that is wanted before and after a step may be missing during it, unless the
// service cannot modify load balancers. The writes in sum may exceed the least by a fifth.
func TestWorlds(t *testing.T) {
	var least, writes, steps, gaps atomic.Int64
	expected := 0
	t.Run("world", func(t *testing.T) {
		for _, w := range readWorlds(t) {
			expected += w.expectations()
			t.Run(w.Name, func(t *testing.T) {
				parallel(t)
				r := newReplay(t, w, false)
				for i := range w.Steps {
					if !t.Run(strings.ReplaceAll(w.Steps[i].Name, " ", "_"), func(t *testing.T) { r.step(t, &w.Steps[i]) }) {
						return
					}
				}
				if r.steps != w.expectations() {
					t.Errorf("compared %d steps of %d", r.steps, w.expectations())
				}
				gaps.Add(int64(r.gaps))
				least.Add(int64(r.least))
				writes.Add(int64(r.writes))
				steps.Add(int64(r.steps))
			})
		}
	})
	t.Logf("%d steps with an expectation; %d writes where the least is %d; %d gaps", steps.Load(), writes.Load(), least.Load(), gaps.Load())
	if *worlds == testdata && expected != testdataSteps {
		t.Errorf("the worlds have %d steps with an expectation, want %d", expected, testdataSteps)
	}
	if writes.Load()*10 > least.Load()*12 {
		t.Errorf("%d writes are more than 1.2 times the least, %d", writes.Load(), least.Load())
	}
}

// replay is an agent beside a service in memory.
type replay struct {
	world   *world
	hns     *fakehns.Service
	api     winkernel.HNS
	tracker *tracker.Tracker
	backend *winkernel.Backend
	cursor  *ruleset.Cursor
	// had holds the frontends after the last step.
	had map[winkernel.Frontend]bool
	// objects remembers the current objects, which a new process gets.
	objects map[string][]byte
	// steps, writes, least and gaps count what TestWorlds reports.
	steps, writes, least, gaps int
	// hurried leaves out checks of the service where only objects changed.
	hurried bool
}

// newReplay returns an agent before the first step. A direct one calls the service in memory also
// with -dlls.
func newReplay(t *testing.T, w *world, direct bool) *replay {
	r := &replay{world: w, hns: fakehns.New(w.network(&w.HNS.Network), w.HNS.Features.ModifyLoadBalancer), objects: map[string][]byte{}}
	if r.api = r.hns; !direct {
		r.api = api(t, r.hns)
	}
	for i := range w.HNS.Endpoints {
		r.hns.Plug(w.HNS.Endpoints[i].endpoint())
	}
	for i := range w.HNS.LoadBalancers {
		r.hns.Place(w.HNS.LoadBalancers[i].lb(func(a netip.Addr) string { return r.endpointAt(t, a) }))
	}
	r.start(t)
	return r
}

// endpointAt returns the ID of an endpoint with an address, a local one if there are two, or
// an ID that does not exist.
func (r *replay) endpointAt(t *testing.T, a netip.Addr) string {
	t.Helper()
	out := "missing-" + a.String()
	endpoints := must.Get(r.hns.Endpoints())(t)
	for _, e := range endpoints {
		if slices.Contains(e.Addrs, a) && (!e.Remote || strings.HasPrefix(out, "missing-")) {
			out = e.ID
		}
	}
	return out
}

// start makes a new process.
func (r *replay) start(t *testing.T) {
	t.Helper()
	c := &r.world.Config
	var families []tracker.Family
	for _, f := range r.world.Families {
		families = append(families, map[string]tracker.Family{"IPv4": tracker.IPv4, "IPv6": tracker.IPv6}[f])
	}
	r.tracker = must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: c.NodeName}, Families: families, OnService: winkernel.OnService}))(t)
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: r.tracker}))(t)
	r.backend = must.Get(winkernel.New(t.Context(), winkernel.Config{
		HNS: r.api, Network: c.NetworkName, Node: c.NodeName, NodeIPs: c.NodeIPs, DSR: r.world.DSR, HostMAC: c.HostMAC, SourceVIP: c.SourceVIP,
		ForwardHealthCheckVIP: c.ForwardHealthCheckVIP, RootEndpoint: c.RootEndpointName, HealthzPort: c.HealthzPort,
	}))(t)
	r.cursor = engine.Attach("winkernel", r.backend)
	for _, key := range slices.Sorted(maps.Keys(r.objects)) {
		must.Do(t, apply(r.tracker, r.objects[key]))
	}
	r.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// play performs the events and the changes of objects of a step.
func (r *replay) play(t *testing.T, s *worldStep) {
	t.Helper()
	r.events(t, s)
	for _, d := range s.Delete {
		name := types.NamespacedName{Namespace: d.Namespace, Name: d.Name}
		delete(r.objects, d.Kind+"/"+name.String())
		switch d.Kind {
		case "Service":
			r.tracker.DeleteService(name)
		case "EndpointSlice":
			r.tracker.DeleteSlice(name)
		}
	}
	for _, raw := range s.Apply {
		r.objects[objectKey(t, raw)] = raw
		must.Do(t, apply(r.tracker, raw))
	}
	if s.Restart {
		r.start(t)
	}
	r.hns.Calls()
}

// step plays a step and compares the state.
func (r *replay) step(t *testing.T, s *worldStep) {
	t.Helper()
	r.play(t, s)
	missed := r.watchFrontends(t, s)
	r.sync(t, s, s.Expect == nil)
	r.count(s)
	if t.Failed() || s.Expect == nil {
		r.remember(t)
		return
	}
	r.steps++
	r.compare(t, s)
	for _, m := range missed() {
		r.gaps++
		t.Errorf("missing during the step: %s", m)
	}
	for _, m := range r.hns.Mistakes() {
		t.Errorf("mistake: %s", m)
	}
	r.remember(t)
}

func objectKey(t *testing.T, raw []byte) string {
	t.Helper()
	o := struct {
		Kind     string
		Metadata struct{ Namespace, Name string }
	}{}
	must.Do(t, json.Unmarshal(raw, &o))
	return o.Kind + "/" + o.Metadata.Namespace + "/" + o.Metadata.Name
}

// events performs what happens to the service.
func (r *replay) events(t *testing.T, s *worldStep) {
	t.Helper()
	r.hns.Before = nil
	for _, e := range s.HNS {
		switch {
		case e.CreateEndpoint != nil:
			r.hns.Plug(e.CreateEndpoint.endpoint())
		case e.DeleteEndpoint != nil:
			r.hns.Unplug(*e.DeleteEndpoint)
		case e.SetNetwork != nil:
			r.hns.SetNetwork(r.world.network(e.SetNetwork))
		case e.Fail != nil:
			left, call, err := e.Fail.Times, fakehns.Call(e.Fail.Call), code(e.Fail.Error)
			r.hns.Before = func(c fakehns.Call) error {
				if c != call || left == 0 {
					return nil
				}
				left--
				return err
			}
		case e.Stop:
			r.hns.Run(false)
		case e.Start:
			r.hns.Run(true)
		default:
			t.Fatalf("unknown event %+v", e)
		}
	}
}

// sync does what an agent does: it checks the service, and syncs until nothing is pending,
// three times at most.
func (r *replay) sync(t *testing.T, s *worldStep, mayFail bool) {
	t.Helper()
	var err error
	if !r.hurried || len(s.HNS) != 0 || len(s.Apply)+len(s.Delete) == 0 {
		err = r.backend.Check(t.Context())
	}
	if errors.Is(err, ruleset.ErrNeedFull) {
		r.cursor.Resync()
	}
	for range 3 {
		if err = r.cursor.Sync(t.Context()); err == nil {
			return
		}
	}
	var waiting *winkernel.WaitingError
	if !mayFail && !errors.As(err, &waiting) {
		t.Errorf("sync: %v", err)
	}
}

// count adds up the writes of a step for which the least number is known.
func (r *replay) count(s *worldStep) {
	calls := r.hns.Calls()
	delete(calls, fakehns.Read)
	if s.Writes.Least == nil || s.Expect == nil {
		return
	}
	for _, n := range calls {
		r.writes += n
	}
	for _, n := range s.Writes.Least {
		r.least += n
	}
}

// watchFrontends looks at the frontends after each write. The result returns those that the
// service had before the step, has after it, and lacked in between. A service that cannot
// modify load balancers cannot avoid this.
func (r *replay) watchFrontends(t *testing.T, s *worldStep) func() []string {
	lacked := map[winkernel.Frontend]bool{}
	before := r.had
	r.hns.After = func(fakehns.Call) {
		now := r.frontends(t)
		for f := range before {
			if !now[f] {
				lacked[f] = true
			}
		}
	}
	return func() (out []string) {
		r.hns.After = nil
		failing := slices.ContainsFunc(s.HNS, func(e worldEvent) bool { return e.Fail != nil || e.SetNetwork != nil })
		if failing || !r.world.HNS.Features.ModifyLoadBalancer {
			return nil
		}
		now := r.frontends(t)
		for f := range lacked {
			if now[f] {
				out = append(out, f.String())
			}
		}
		return out
	}
}

func (r *replay) frontends(t *testing.T) map[winkernel.Frontend]bool {
	t.Helper()
	lbs, err := r.hns.LoadBalancers()
	if err != nil {
		return nil // the service is stopped
	}
	out := map[winkernel.Frontend]bool{}
	for _, lb := range lbs {
		out[lb.Frontend] = true
	}
	return out
}

func (r *replay) remember(t *testing.T) { r.had = r.frontends(t) }

// compare compares the state of the service with the expected one.
func (r *replay) compare(t *testing.T, s *worldStep) {
	t.Helper()
	endpoints := must.Get(r.hns.Endpoints())(t)
	lbs := must.Get(r.hns.LoadBalancers())(t)
	byID, macs := map[string]winkernel.Endpoint{}, map[string]winkernel.Endpoint{}
	var have, may []string
	for _, e := range endpoints {
		byID[e.ID] = e
		have = append(have, describeEndpoint(e))
		if !e.Remote || !strings.HasPrefix(e.MAC, "02-11-") {
			continue // not an agent's, or of a cluster IP, which has the host's
		}
		if o, ok := macs[e.MAC]; ok {
			t.Errorf("endpoints %v and %v have the hardware address %s", o.Addrs, e.Addrs, e.MAC)
		}
		macs[e.MAC] = e
	}
	var want []string
	for i := range s.Expect.Endpoints {
		line := describeEndpoint(s.Expect.Endpoints[i].endpoint())
		if s.Expect.Endpoints[i].Optional {
			may = append(may, line)
		} else {
			want = append(want, line)
		}
	}
	for _, lb := range lbs {
		have = append(have, describeLB(lb, byID))
	}
	for i := range s.Expect.LoadBalancers {
		l := &s.Expect.LoadBalancers[i]
		lines := []string{describeLB(l.lb(netip.Addr.String), nil)}
		for _, o := range l.AnyOf {
			other := *l
			other.InternalPort, other.Endpoints = o.InternalPort, o.Endpoints
			lines = append(lines, describeLB(other.lb(netip.Addr.String), nil))
		}
		if at := slices.IndexFunc(lines, func(line string) bool { return slices.Contains(have, line) }); at > 0 {
			lines[0] = lines[at]
		}
		if l.Optional {
			may = append(may, lines[0])
		} else {
			want = append(want, lines[0])
		}
	}
	for _, line := range want {
		if i := slices.Index(have, line); i >= 0 {
			have = slices.Delete(have, i, i+1)
		} else {
			t.Errorf("missing: %s", line)
		}
	}
	for _, line := range have {
		if i := slices.Index(may, line); i >= 0 {
			may = slices.Delete(may, i, i+1)
		} else {
			t.Errorf("unexpected: %s", line)
		}
	}
}

// describeEndpoint returns an endpoint as a line. Only the prefix of a remote IPv6 endpoint's
// MAC is defined.
func describeEndpoint(e winkernel.Endpoint) string {
	mac := e.MAC
	if e.Remote && e.Addrs[0].Is6() {
		mac = mac[:6]
	}
	return fmt.Sprintf("endpoint %v remote=%v mac=%s provider=%v", e.Addrs, e.Remote, mac, e.Provider)
}

// describeLB returns a load balancer as a line, with addresses in place of the IDs in byID.
func describeLB(lb winkernel.LoadBalancer, byID map[string]winkernel.Endpoint) string {
	var addrs []string
	for _, id := range lb.Endpoints {
		a := id
		for _, is := range byID[id].Addrs {
			if tracker.FamilyOf(is) == lb.Frontend.Family {
				a = is.String()
			}
		}
		addrs = append(addrs, a)
	}
	slices.Sort(addrs)
	return fmt.Sprintf("load balancer %v to %d of %v dsr=%v flags=%d affinity=%v source=%v", lb.Frontend, lb.InternalPort, addrs, lb.DSR, lb.Flags, lb.ClientAffinity, lb.SourceVIP)
}
