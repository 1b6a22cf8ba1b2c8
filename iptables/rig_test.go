package iptables

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// system is where a test runs: a kernel in memory, or one of Linux.
type system struct {
	Flavor
	memory bool
}

// String returns the name of subtests.
func (s system) String() string {
	if s.memory {
		return "memory-" + string(s.Flavor)
	}
	return string(s.Flavor)
}

// systems runs a test in memory and, on Linux, with the programs that are installed: with both
// flavors, or those listed.
func systems(t *testing.T, f func(t *testing.T, s system), only ...Flavor) {
	t.Helper()
	for _, s := range append([]system{{NFT, true}, {Legacy, true}}, linuxSystems...) {
		if len(only) != 0 && !slices.Contains(only, s.Flavor) {
			continue
		}
		t.Run(s.String(), func(t *testing.T) {
			need(t, s)
			if len(only) == 0 {
				needSecond(t, s)
			}
			f(t, s)
		})
	}
}

// testNode is the node of a rig.
type testNode interface {
	// open returns the kernel.
	open(c Config) (kernel, error)
	// command runs iptables, or the program with a suffix, as another program would.
	command(f tracker.Family, suffix string, args ...string) (string, error)
	// sysctl and setSysctl use a sysctl as another program would.
	sysctl(name string) string
	setSysctl(name, value string) error
	// timeout sets the time after which programs that misbehave are killed.
	timeout(d time.Duration)
	// hide makes iptables-save unable to print the tables, as rules of another program do, until
	// show is called.
	hide() (show func())
	// set makes iptables-restore misbehave: "refuse" lines that contain what, be "missing", "hang", or be "late": hang
	// after it did its work. "" makes it work again.
	set(how, what string)
	// calls returns the lines that were written since the last call.
	calls() []string
}

// watch records what iptables-restore is called with, and can make it misbehave.
type watch struct {
	mu      sync.Mutex
	written []string
	how     string
	what    string
}

func (w *watch) set(how, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.how, w.what = how, what
}

func (w *watch) calls() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.written
	w.written = nil
	if out == nil {
		out = []string{""}
	}
	return out
}

// restore records an input. It returns the error of one that fails, or how the program should misbehave otherwise.
func (w *watch) restore(f tracker.Family, input []byte) (how string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for line := range strings.Lines(string(input)) {
		if n++; w.how == "refuse" && err == nil && strings.Contains(line, w.what) {
			err = &CommandError{
				Program: "watched-restore", Status: 1, Message: fmt.Sprintf("line %d failed", n), Line: n, Text: strings.TrimSuffix(line, "\n"),
			}
		}
		if !strings.HasPrefix(line, "-C") && !strings.HasPrefix(line, ":") && !strings.HasPrefix(line, "COMMIT") {
			w.written = append(w.written, programName(f)+" "+strings.TrimSpace(line))
		}
	}
	switch w.how {
	case "hang", "late":
		how = w.how
	case "missing":
		err = os.ErrNotExist
	}
	return how, err
}

// programName is the name of a family's program.
func programName(f tracker.Family) string {
	if f == tracker.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// rig is a pipeline from a tracker to one kernel, which a test drives step by step.
type rig struct {
	testing.TB
	flavor  system
	node    testNode
	config  Config
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
}

const thisNode = backendtest.ThisNode

func newRig(tb testing.TB, s system, edits ...func(*Config)) *rig {
	tb.Helper()
	r := &rig{TB: tb, flavor: s, config: Config{Flavor: s.Flavor}}
	if s.memory {
		r.node = newMemory(s.Flavor)
	} else {
		r.node = newLinuxNode(tb, s.Flavor, &r.config)
	}
	for _, e := range edits {
		e(&r.config)
	}
	p := backendtest.NewNode(tb, tracker.Config{})
	r.tracker, r.engine = p.Tracker, p.Engine
	r.start()
	tb.Cleanup(func() { r.backend.Close() })
	r.node.calls()
	return r
}

// onlyIPv4 is an edit for tests that need one family.
func onlyIPv4(c *Config) { c.Families = []tracker.Family{tracker.IPv4} }

// start attaches a new backend, as a new process would.
func (r *rig) start() {
	r.Helper()
	if r.cursor != nil {
		r.cursor.Detach()
		r.backend.Close()
	}
	c, err := r.config.withDefaults()
	if err != nil {
		r.Fatal(err)
	}
	k, err := r.node.open(c)
	if err != nil {
		r.Fatal(err)
	}
	if r.backend, err = newBackend(context.Background(), c, k); err != nil {
		r.Fatal(err)
	}
	r.cursor = r.engine.Attach("iptables", r.backend)
}

// with calls one of the package's functions about the rig's node.
func (r *rig) with(f func(Config, kernel) error) error {
	c, err := r.config.withDefaults()
	if err != nil {
		return err
	}
	k, err := r.node.open(c)
	if err != nil {
		return err
	}
	defer k.Close()
	return f(c, k)
}

// These call the package's functions, on Linux the exported ones.

func (r *rig) cleanup() error {
	if !r.flavor.memory {
		return Cleanup(r.Context(), r.config)
	}
	return r.with(func(c Config, k kernel) error { return cleanup(r.Context(), c, k, (*family).cleanup) })
}

func (r *rig) owned() (owned bool, err error) {
	if !r.flavor.memory {
		return Owned(r.Context(), r.config)
	}
	err = r.with(func(c Config, k kernel) error {
		owned, err = anyFamilyOf(r.Context(), c, k, (*family).owned)
		return err
	})
	return owned, err
}

func (r *rig) foreign() (foreign bool, err error) {
	if !r.flavor.memory {
		return Foreign(r.Context(), r.config)
	}
	err = r.with(func(c Config, k kernel) error {
		foreign, err = anyFamilyOf(r.Context(), c, k, (*family).foreign)
		return err
	})
	return foreign, err
}

func (r *rig) lookup(queries ...dataplane.Query) (found []dataplane.Found, err error) {
	if !r.flavor.memory {
		return LookupAll(r.Context(), r.config, queries)
	}
	err = r.with(func(c Config, k kernel) (err error) {
		found, err = lookup(r.Context(), c, k, queries)
		return err
	})
	return found, err
}

func (r *rig) probe() error {
	return r.with(func(c Config, k kernel) error {
		c.uncounted = true
		return backendconf.Probe(newBackend(r.Context(), c, k))
	})
}

func (r *rig) setSysctls() error {
	if !r.flavor.memory {
		return SetSysctls(r.Context(), r.config)
	}
	return r.with(func(c Config, k kernel) error { return setSysctls(r.Context(), c, k) })
}

func (r *rig) traffic() (out *dataplane.Traffic, err error) {
	if !r.flavor.memory {
		return Traffic(r.Context(), r.config)
	}
	err = r.with(func(c Config, k kernel) error {
		out, err = readTraffic(r.Context(), c, k)
		return err
	})
	return out, err
}

func (r *rig) sync() {
	r.Helper()
	if err := r.cursor.Sync(context.Background()); err != nil {
		r.Fatal(err)
	}
}

// command runs iptables or ip6tables of the flavor in the namespace.
func (r *rig) command(f tracker.Family, suffix string, args ...string) string {
	r.Helper()
	out, err := r.try(f, suffix, args...)
	if err != nil {
		r.Fatalf("%v: %s", err, out)
	}
	return out
}

func (r *rig) try(f tracker.Family, suffix string, args ...string) (string, error) {
	return r.node.command(f, suffix, args...)
}

// file writes lines to a file and returns its name.
func (r *rig) file(lines ...string) string {
	r.Helper()
	name := filepath.Join(r.TempDir(), "input")
	if err := os.WriteFile(name, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		r.Fatal(err)
	}
	return name
}

// listing holds the rules of each chain, with keys such as "nat KUBE-SERVICES".
type listing map[string][]string

// kernel reads the tables with iptables-save, except the canaries.
func (r *rig) kernel(f tracker.Family) listing {
	r.Helper()
	return listingOf(r.command(f, "-save"))
}

// listingOf parses the output of iptables-save.
func listingOf(text string) listing {
	out := listing{}
	for table, chains := range iptext.Parse(text) {
		for name, rules := range chains {
			if strings.HasPrefix(name, "KUBE-") || len(rules) != 0 {
				out[table+" "+name] = append([]string{}, rules...)
			}
		}
	}
	for t := range tables {
		delete(out, t.String()+" "+chainCanary)
	}
	return out
}

// size counts the rules of our own chains.
func (l listing) size() (n [tables]int) {
	for name, rules := range l {
		for t := range tables {
			if strings.HasPrefix(name, t.String()+" KUBE-") {
				n[t] += len(rules)
			}
		}
	}
	return n
}

// want renders the tables of some Services.
func (r *rig) want(f tracker.Family, services []*ruleset.Port) listing {
	r.Helper()
	i := slices.IndexFunc(r.backend.families, func(x *family) bool { return x.family == f })
	m, err := newModel(r.backend.families[i].settings, r.engine.Snapshot().Node)
	if err != nil {
		r.Fatal(err)
	}
	out := listing{}
	add := func(c chain) {
		if c.rules == nil {
			c.rules = []string{}
		}
		if _, twice := out[c.table.String()+" "+c.name]; twice {
			r.Fatalf("chain %s is rendered twice", c.name)
		}
		out[c.table.String()+" "+c.name] = c.rules
	}
	for _, s := range services {
		if s.Key.Family != f {
			continue
		}
		m.change(s.Key, s, func(_, now []chain) {
			for _, c := range now {
				add(c)
			}
		})
	}
	m.allChains(add)
	for _, h := range m.hooks() {
		k := h.table.String() + " " + h.chain
		out[k] = slices.Insert(out[k], 0, h.rule)
	}
	return out
}

// verify compares the kernel with the ruleset.
func (r *rig) verify() {
	r.Helper()
	r.verifyBut()
}

// verifyBut does so except for chains of other programs.
func (r *rig) verifyBut(others ...string) {
	r.Helper()
	r.verifyServices(r.engine.Snapshot().Ports, others...)
}

// verifyServices compares the kernel with the rules of some Services.
func (r *rig) verifyServices(services []*ruleset.Port, others ...string) {
	r.Helper()
	for _, f := range r.backend.families {
		got, want := r.kernel(f.family), r.want(f.family, services)
		if f.model == nil {
			r.Error("the backend has no model of the tables")
		} else if size := f.model.size(); size != got.size() {
			r.Errorf("%s: the model has %v rules in filter and nat, the kernel %v", f.family, size, got.size())
		}
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if !slices.Equal(got[name], want[name]) {
				r.Fatalf("%v: %s is\n\t%s\nwant\n\t%s", f.family, name, strings.Join(got[name], "\n\t"), strings.Join(want[name], "\n\t"))
			}
		}
		for name, rules := range got {
			if _, ok := want[name]; !ok && !slices.Contains(others, name) {
				r.Fatalf("%v: %s is left: %v", f.family, name, rules)
			}
		}
	}
	if err := r.backend.Check(context.Background()); err != nil {
		r.Fatal(err)
	}
}

// svc returns a dual-stack Service number i with edits.
func svc(i int, edits ...func(*v1.Service)) *v1.Service {
	v4, v6 := fmt.Sprintf("10.96.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:10:96::%x", i+1)
	return backendtest.Service(backendtest.ServiceName(i), "p", v4, v6, edits...)
}

// slice returns the EndpointSlice of Service i with endpoints. Numbers divisible by three are
// on this node.
func slice(i int, f tracker.Family, endpoints ...int) *discovery.EndpointSlice {
	es := backendtest.Slice(backendtest.ServiceName(i), f.String(), f, "p", v1.ProtocolTCP)
	for _, n := range endpoints {
		a := fmt.Sprintf("10.244.%d.%d", n>>8, n&255)
		if f == tracker.IPv6 {
			a = fmt.Sprintf("fd00:10:244::%x", n+1)
		}
		node := "node-b"
		if n%3 == 0 {
			node = thisNode
		}
		es.Endpoints = append(es.Endpoints, backendtest.Endpoint(a, node))
	}
	return es
}

// set passes Service i with its endpoints to the tracker.
func (r *rig) set(i int, endpoints []int, edits ...func(*v1.Service)) {
	r.tracker.SetService(svc(i, edits...))
	r.setEndpoints(i, endpoints...)
}

func (r *rig) setEndpoints(i int, endpoints ...int) {
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r.tracker.SetSlice(slice(i, f, endpoints...))
	}
}

// These are the same in the tests of all backends.
var (
	upTo          = backendtest.UpTo
	nodePort      = backendtest.NodePort
	affinity      = backendtest.Affinity
	externalLocal = backendtest.ExternalLocal
	internalLocal = backendtest.InternalLocal
	overUDP       = backendtest.Over(v1.ProtocolUDP)
	externalIPs   = backendtest.ExternalIPs("198.51.100.1", "2001:db8:3::1")
)

func loadBalancer(s *v1.Service) {
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	s.Spec.Ports[0].NodePort = 30080
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}, {IP: "2001:db8:1::1"}}
	s.Spec.LoadBalancerSourceRanges = []string{"172.16.0.0/12", "2001:db8:2::/48"}
}

// skips lists the features of the suite that iptables lacks.
var skips = map[conformance.Feature]string{
	conformance.ConsistentHash:    "iptables has no match that hashes",
	conformance.LoopbackNodePorts: "Config.LocalhostNodePorts serves them in IPv4, whatever the ruleset says",
}

// saved returns the output of iptables-save for all tables.
func saved(ctx context.Context, f *family) (string, error) {
	var out strings.Builder
	err := f.Save(ctx, "", &out)
	return out.String(), err
}

// dump returns our chains and the rules of the kernel's own chains.
func dump(tb testing.TB, b *Backend) string {
	var out strings.Builder
	for _, f := range b.families {
		text := must.Get(saved(tb.Context(), f))(tb)
		l := listingOf(text)
		for _, name := range slices.Sorted(maps.Keys(l)) {
			for _, rule := range append([]string{"chain"}, l[name]...) {
				fmt.Fprintf(&out, "%v %s %s\n", f.family, name, rule)
			}
		}
	}
	return out.String()
}

// needCounters skips the test if the kernel has no accounting objects, or if iptables has
// no match for them.
func needCounters(tb testing.TB, b *Backend) {
	tb.Helper()
	c := must.Get(b.Counters())(tb)
	if len(c) == 0 {
		lacks(tb, "accounting objects (CONFIG_NETFILTER_NETLINK_ACCT, CONFIG_NETFILTER_XT_MATCH_NFACCT)")
	}
}
