package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/byname"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// World is a small cluster around one node, in network namespaces, with a backend. Sync and Churn are not safe for
// concurrent use, and Sync must be called by the goroutine of the test.
type World struct {
	// Tracker takes Services and EndpointSlices. It already has the node and is
	// synced. Engine and Cursor connect it to the backend.
	Tracker *tracker.Tracker
	Engine  *ruleset.Engine
	Cursor  *ruleset.Cursor
	// Env is the environment of the backend.
	Env Env

	answers
	tb testing.TB
	skips
	config config
	pods   []string
	rng    *rand.Rand
	// services holds the words of each Service of a script. objects holds the Services and EndpointSlices of
	// the API server, which a new process reads.
	services map[string]map[string]string
	objects  [2]map[types.NamespacedName]worldgen.Op
	info     tracker.NodeInfo
	cidrs    []netip.Prefix
	inUse    []netip.Prefix
}

// Env is the environment of a backend.
type Env struct {
	// NetNS is an open file of the node's network namespace. It stays open until the
	// test ends.
	NetNS *os.File
	// Families lists the address families in use.
	Families []tracker.Family

	do func(func() error) error
}

// Do runs f on a thread in the node's network namespace, so that a backend can open sockets outside of New and Apply.
// Goroutines that f starts run outside. Do may be called from any goroutine until the test ends. It returns the error
// of f, or an error if it cannot enter the namespace.
func (e Env) Do(f func() error) error { return e.do(f) }

// answers is where a world's packets get their answers: hosts that connect (connections), or a
// function (simulated).
type answers interface {
	// start makes the backend of a new process, and sync syncs it.
	start() ruleset.Backend
	sync() error
	// judged reports whether the answer to a packet can be compared with its verdict.
	judged(s *ruleset.Snapshot, v ruleset.Verdict, p ruleset.Packet) bool
	// outcome returns what happens to a packet of a host.
	outcome(from string, p ruleset.Packet, v ruleset.Verdict) (Outcome, error)
	// atOnce is the number of concurrent calls of outcome.
	atOnce() int
	// count returns a function that compares the backend's counters with the packets since.
	count() (compare func() error)
	// masquerades reports whether an endpoint must see an address of the node.
	masquerades(p ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool
	// step performs a step of a script about connections that stay, or about many of them.
	step(s *play, word, rest string, below []line) error
	// cold returns a second backend with a data plane of its own. sync syncs its Cursor, and dumps returns what both
	// backends have written; dumps is nil if that cannot be read.
	cold(tb testing.TB) (b ruleset.Backend, sync func(*ruleset.Cursor) error, dumps func() (got, want string))
}

// skips holds the features that a backend lacks, as [Options].Skip.
type skips map[Feature]string

func (s skips) does(f Feature) bool {
	_, lacks := s[f]
	return !lacks
}

const hashSeed = 0x70726f78696572

type config struct {
	// clients and remotePods are the numbers of hosts, 0 for the default.
	clients           int
	remotePods        int
	bridge            bool
	sctp              bool
	masqueradeAll     bool
	nodePortAddresses []string
	// bound lists further addresses of the node.
	bound []string
	// localTraffic nil means the CIDR of the local pods.
	localTraffic *ruleset.LocalTraffic
	// delta is the Delta of the engine's [ruleset.Budget].
	delta int
}

// newWorldOf returns a world without answers and without a process.
func newWorldOf(tb testing.TB, c config, families []tracker.Family, skip skips, rng *rand.Rand) *World {
	c.clients, c.remotePods = cmp.Or(c.clients, 4), cmp.Or(c.remotePods, defaultRemotePods)
	if c.localTraffic == nil {
		c.localTraffic = &ruleset.LocalTraffic{CIDRs: each(families, localPodCIDR)}
	}
	w := &World{
		Env: Env{Families: families}, tb: tb, skips: skip, config: c, pods: podNames(c.remotePods), rng: rng,
		services: map[string]map[string]string{}, info: firstNode(families), cidrs: each(families, serviceCIDR),
	}
	for i := range w.objects {
		w.objects[i] = map[types.NamespacedName]worldgen.Op{}
	}
	return w
}

func firstNode(families []tracker.Family) tracker.NodeInfo {
	return tracker.NodeInfo{Name: nodeName, Zone: zone, Addresses: each(families, func(f tracker.Family) netip.Addr { return address(nodeName, f) })}
}

// apply changes an object, for this process and for later ones.
func (w *World) apply(o worldgen.Op) {
	switch {
	case o.SetService != nil:
		w.objects[0][types.NamespacedName{Namespace: o.SetService.Namespace, Name: o.SetService.Name}] = o
	case o.SetSlice != nil:
		w.objects[1][types.NamespacedName{Namespace: o.SetSlice.Namespace, Name: o.SetSlice.Name}] = o
	case o.DeleteService != nil:
		delete(w.objects[0], *o.DeleteService)
	case o.DeleteSlice != nil:
		delete(w.objects[1], *o.DeleteSlice)
	case o.SetNode != nil:
		w.info = *o.SetNode
	}
	o.Apply(w.Tracker)
}

// attach starts a process: a new tracker and engine, all objects, Services in any order, and a
// backend on the data plane in its current state.
func (w *World) attach() {
	w.tb.Helper()
	t, err := tracker.New(tracker.Config{
		Node: w.info, Families: w.Env.Families,
		// Annotations carry the settings without an API field.
		OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint,
	})
	if err != nil {
		w.tb.Fatal(err)
	}
	nodePorts, err := ruleset.ParseNodePortAddresses(w.config.nodePortAddresses)
	if err != nil {
		w.tb.Fatal(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{
		Source: t, MasqueradeAll: w.config.masqueradeAll, LocalTraffic: *w.config.localTraffic,
		NodePortAddresses: nodePorts, ServiceCIDRs: w.cidrs, HashSeed: hashSeed, Budget: ruleset.Budget{Delta: w.config.delta},
	})
	if err != nil {
		w.tb.Fatal(err)
	}
	w.Tracker, w.Engine = t, e
	if w.inUse != nil {
		e.SetServiceCIDRs(w.cidrs, w.inUse)
	}
	for i, objects := range w.objects {
		names := slices.SortedFunc(maps.Keys(objects), byname.Compare)
		if i == 0 && len(names) != 0 {
			w.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		}
		for _, n := range names {
			objects[n].Apply(t)
		}
	}
	backend := w.start()
	if backend == nil {
		w.tb.Fatal("conformance: New or Backend returned no backend")
	}
	w.Cursor = e.Attach("conformance", backend)
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// Sync calls the Cursor's Sync and fails the test on an error.
func (w *World) Sync() {
	w.tb.Helper()
	if err := w.sync(); err != nil {
		w.tb.Fatalf("sync: %v", err)
	}
}

func (w *World) packet(from string, proto v1.Protocol, to netip.AddrPort) ruleset.Packet {
	f := tracker.FamilyOf(to.Addr())
	return ruleset.Packet{
		From: address(from, f), InInterface: w.config.interfaceOf(from), Protocol: proto, To: to, NodeAddresses: w.nodeAddresses(f),
	}
}

func (w *World) nodeAddresses(f tracker.Family) []netip.Addr {
	out := nodeAddresses(f)
	for _, name := range w.config.bound {
		out = append(out, address(name, f))
	}
	return out
}

func (w *World) podAt(a netip.Addr) string {
	i := slices.IndexFunc(w.pods, func(name string) bool { return address(name, tracker.FamilyOf(a)) == a })
	if i < 0 {
		return ""
	}
	return w.pods[i]
}

// describe formats a verdict as the result of a row.
func (w *World) describe(v ruleset.Verdict) string {
	if v.Action != ruleset.ActionForward {
		return v.Action.String()
	}
	var names []string
	for _, ep := range v.Endpoints {
		n := w.podAt(ep.Addr.Addr())
		switch port := ep.Addr.Port(); {
		case n == "":
			n = ep.Addr.Addr().String()
		case port != podPort:
			n += fmt.Sprint(":", port)
		}
		if v.MasqueradeTo(ep) {
			n += "*"
		}
		names = append(names, n)
	}
	return sortWords(strings.Join(names, " "))
}

type probe struct {
	from  string
	proto v1.Protocol
	to    netip.AddrPort
	// want is the result in a row, "" for any. Trace determines the result. want documents it, and
	// detects worlds that do not test what they should.
	want string
}

// enough bounds the failures reported for one check.
const enough = 8

// judgeAll judges connections and returns those that failed, with their errors. Connections to a Service with
// affinity follow one another, because two concurrent ones of a client could store two affinities, and so do those
// over SCTP, because an ICMP error reaches every raw socket between the two addresses.
func (w *World) judgeAll(probes []probe) (failed []probe, err error) {
	s := w.Engine.Snapshot()
	var order []string
	groups := map[string][]probe{}
	for i, p := range probes {
		key := fmt.Sprint(i)
		if v := s.Trace(w.packet(p.from, p.proto, p.to)); p.proto == sctp {
			key = "SCTP"
		} else if v.Affinity != 0 {
			key = v.Port.Key.String()
		}
		if groups[key] == nil {
			order = append(order, key)
		}
		groups[key] = append(groups[key], p)
	}
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		limit = make(chan struct{}, w.atOnce())
	)
	one := func(p probe) {
		mu.Lock()
		done := len(failed) >= enough
		mu.Unlock()
		if done {
			return
		}
		if e := w.judge(s, p); e != nil {
			mu.Lock()
			defer mu.Unlock()
			failed, err = append(failed, p), errors.Join(err, e)
		}
	}
	for _, key := range order {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			for _, p := range groups[key] {
				one(p)
			}
		})
	}
	wg.Wait()
	return failed, err
}

func each[T any](families []tracker.Family, f func(tracker.Family) T) []T {
	out := make([]T, 0, len(families))
	for _, x := range families {
		out = append(out, f(x))
	}
	return out
}

// validFamilies validates the families to test. Nil means both.
func validFamilies(families []tracker.Family) ([]tracker.Family, error) {
	if families == nil {
		return []tracker.Family{tracker.IPv4, tracker.IPv6}, nil
	}
	if len(families) == 0 {
		return nil, errors.New("conformance: Options.Families is empty")
	}
	for i, f := range families {
		if f != tracker.IPv4 && f != tracker.IPv6 || slices.Contains(families[:i], f) {
			return nil, fmt.Errorf("conformance: Options.Families %v must be one or both of IPv4 and IPv6", families)
		}
	}
	return families, nil
}

// compareDump compares the result of writing step by step with that of writing everything in one delta.
func (w *World) compareDump() error {
	inner := &quiet{TB: w.tb}
	defer inner.cleanup()
	backend, sync, dumps := w.cold(inner)
	if dumps == nil {
		return nil
	}
	cursor := w.Engine.Attach("cold", backend)
	defer cursor.Detach()
	if err := sync(cursor); err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	if got, want := dumps(); got != want {
		if d := difference(got, want); d != "" {
			return fmt.Errorf("the incremental contents differ from those of a cold start:\n%s", d)
		}
	}
	return nil
}

func syncOnly(c *ruleset.Cursor) error { return c.Sync(context.Background()) }
