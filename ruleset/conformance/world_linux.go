package conformance

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// connections are the [answers] of hosts in network namespaces.
type connections struct {
	*World
	options Options
	net     *network
	backend ruleset.Backend
	dump    func(testing.TB, Env, ruleset.Backend) string
	// made counts the results of the last check's connections.
	made tally
	// memory is what steps of scripts remember.
	memory
}

func (w *World) lab() *connections { return w.answers.(*connections) }

// NewWorld makes a World without Services, for tests beyond those of [Run]: pods on the node and on another one, and
// external clients. The CIDRs of the local pods determine local traffic, and NodePorts are served at all of the
// node's addresses. Options.Skip has no effect. NewWorld skips the test if namespaces cannot be made. The World is
// removed when the test ends. Retransmissions during a stall of the machine are excused and limited as by [Run], but
// for this World alone.
func NewWorld(tb testing.TB, o Options) *World {
	tb.Helper()
	return newWorld(tb, o, config{})
}

func newWorld(tb testing.TB, o Options, c config) *World {
	tb.Helper()
	families, err := o.validate()
	if err != nil {
		tb.Fatal(err)
	}
	netlab.Require(tb)
	stalls, counts := stall.Start(), new(excuses)
	tb.Cleanup(stalls.Stop)
	stalls.Always = o.stalled
	tb.Cleanup(func() {
		if o.run == nil {
			counts.report(tb)
			return
		}
		tb.Log(counts)
		o.run.add(counts)
	})
	w := newWorldOf(tb, c, families, o.Skip, rand.New(rand.NewPCG(1, 1)))
	l := &connections{World: w, options: o}
	w.answers = l
	l.net = newNetwork(w, stalls, counts)
	w.Env = Env{NetNS: l.net.node.File(), Families: families, do: l.net.node.Do}
	if o.Client != nil {
		for name, h := range l.net.hosts {
			if c.interfaceOf(name) == "" || slices.Contains(podNames(0), name) {
				h.client = func(f func() error) error { return o.Client(w.Env, f) }
				l.net.hosts[name] = h
			}
		}
	}
	w.attach()
	return w
}

// timeout returns the time to wait for a connection that must be accepted or refused.
func (l *connections) timeout() time.Duration { return cmp.Or(l.options.timeout, testtime.Timeout) }

func (l *connections) start() (b ruleset.Backend) {
	l.tb.Helper()
	if err := l.Do(func() error {
		b = l.options.New(l.tb, l.Env)
		return nil
	}); err != nil {
		l.tb.Fatal(err)
	}
	l.backend = b
	return b
}

// Do runs f on a thread in the node's network namespace. Goroutines that f starts run
// outside. Do returns the error of f, or an error if it cannot enter the namespace.
func (w *World) Do(f func() error) error { return w.Env.Do(f) }

func (l *connections) sync() error {
	return l.Do(func() error { return syncOnly(l.Cursor) })
}

func (l *connections) cold(tb testing.TB) (b ruleset.Backend, sync func(*ruleset.Cursor) error, dumps func() (got, want string)) {
	dump := l.dump
	if dump == nil {
		return nil, nil, nil
	}
	_, hosts := netlab.NewHosts(tb, "cold")
	h := hosts["cold"]
	for _, f := range l.Env.Families {
		for _, a := range nodeAddresses(f)[:3] {
			if err := h.AddAddr("lo", single(a)); err != nil {
				tb.Fatal(err)
			}
		}
	}
	env := Env{NetNS: h.File(), Families: l.Env.Families, do: h.Do}
	if err := h.Do(func() error {
		b = l.options.New(tb, env)
		return nil
	}); err != nil {
		tb.Fatal(err)
	}
	sync = func(c *ruleset.Cursor) error { return h.Do(func() error { return syncOnly(c) }) }
	return b, sync, func() (got, want string) { return dump(l.tb, l.Env, l.backend), dump(tb, env, b) }
}

// Pod is a server that Services can send to. It serves TCP and UDP at [Pod.Ports].
type Pod struct {
	// Name is the name of the pod, and Node that of its node.
	Name, Node string
	addr       func(tracker.Family) netip.Addr
}

// Addr returns the pod's address.
func (p Pod) Addr(f tracker.Family) netip.Addr { return p.addr(f) }

// Ports returns the two ports of every pod.
func (Pod) Ports() [2]uint16 { return [2]uint16{podPort, podPort2} }

// Pods returns the pods of the world, local ones first.
func (w *World) Pods() []Pod {
	out := make([]Pod, 0, len(w.pods))
	for _, name := range w.pods {
		out = append(out, Pod{name, nodeOf(name), addressIn(name)})
	}
	return out
}

// Reach connects once from an external client and returns the server that responded. It returns an error if the
// connection is refused or gets no reply within the time. A UDP connection is one request with its reply, from a new
// port. Reach is safe for concurrent use.
func (w *World) Reach(to Target, wait time.Duration) (netip.AddrPort, error) {
	from := w.lab().net.hosts["client1"]
	o := from.probe(w.tb.Context(), to.Protocol, to.Addr, wait)
	if o.Kind != netlab.Reached {
		return netip.AddrPort{}, fmt.Errorf("%s from %s to %s: %s", to.Protocol, from.name, to.Addr, o)
	}
	return o.Server, nil
}
