package conformance

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func randomConfig(rng *rand.Rand, skip skips, sctp bool) (c config) {
	c.masqueradeAll = skip.does(MasqueradeAll) && rng.IntN(6) == 0
	if skip.does(NodePortAddresses) && rng.IntN(4) == 0 {
		c.nodePortAddresses = [][]string{{"primary"}, {"192.0.2.0/24", "2001:db8:1::/64"}, {"198.51.100.0/24"}}[rng.IntN(3)]
	}
	c.sctp = skip.does(SCTP) && sctp
	if skip.does(InterfaceDetection) {
		switch rng.IntN(5) {
		case 0:
			c.bridge = true
			c.localTraffic = &ruleset.LocalTraffic{Bridge: bridgeName}
		case 1:
			c.localTraffic = &ruleset.LocalTraffic{InterfacePrefix: interfacePrefix}
		case 2:
			c.localTraffic = &ruleset.LocalTraffic{} // unknown
		}
	}
	return c
}

func randomParams(families []tracker.Family, skip skips, c config) worldgen.Params {
	p := worldgen.Params{
		Families:       families,
		Node:           firstNode(families),
		ClusterIP:      numbered("cluster"),
		ExternalIP:     numbered("external"),
		LoadBalancerIP: numbered("lb"),
		Protocols:      []v1.Protocol{tcp},
		Affinity:       skip.does(Affinity),
		Weights:        skip.does(WeightedEndpoints),
		Hash:           skip.does(ConsistentHash),
	}
	if skip.does(UDP) {
		p.Protocols = append(p.Protocols, udp)
	}
	for _, name := range podNames(defaultRemotePods) {
		p.Backends = append(p.Backends, worldgen.Backend{Node: nodeOf(name), Addr: addressIn(name), Ports: []uint16{podPort, podPort2}})
	}
	if !c.sctp {
		// The node itself is an endpoint too. It does not respond to SCTP.
		p.Backends = append(p.Backends, worldgen.Backend{Node: nodeName, Addr: addressIn(nodeName), Ports: []uint16{nodePortOwn}})
	}
	if skip.does(SourceRanges) {
		p.Sources = []string{"192.0.2.10/32", "10.244.1.0/24", "2001:db8:1::/64", "fd00:10:244:1::11/128", "192.0.2.1/32", " 198.51.100.0/24", "2001:db8:2::/48"}
	}
	return p
}

func addressIn(name string) func(tracker.Family) netip.Addr {
	return func(f tracker.Family) netip.Addr { return address(name, f) }
}

// stepRand returns the random choices of a step. They depend on its number only, so that they repeat in a world with
// fewer changes.
func stepRand(seed uint64, step int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(step))) }

// randomly makes a series of changes and calls try, which performs them in a new world and returns the step that
// failed, if any. It then prints a small set of changes that still fails, found within the given time, unless that is
// 0.
func randomly(tb testing.TB, seed uint64, changes int, families []tracker.Family, skip skips, c config, within time.Duration, try func(testing.TB, worldgen.Steps) (int, error)) {
	tb.Helper()
	g := worldgen.New(seed, randomParams(families, skip, c))
	steps := worldgen.Steps{g.Start()}
	for range changes {
		steps = append(steps, g.Step())
	}
	quietly := func(steps worldgen.Steps) (int, error) {
		inner := &quiet{TB: tb}
		defer inner.cleanup()
		return try(inner, steps)
	}
	at, err := quietly(steps)
	if err == nil {
		return
	}
	tb.Errorf("seed %d, step %d: %v", seed, at, err)
	if within == 0 {
		return
	}
	steps = steps[:at+1]
	deadline := time.Now().Add(within)
	fewer := worldgen.Minimize(steps, func(fewer worldgen.Steps) bool {
		_, err := quietly(fewer)
		return err != nil
	}, func() bool { return time.Now().After(deadline) })
	_, err = quietly(fewer)
	tb.Errorf("%d of %d changes suffice to fail (local traffic %+v, NodePort addresses %v, masquerade all %v): %v\n%s",
		fewer.Ops(), steps.Ops(), c.localTraffic, c.nodePortAddresses, c.masqueradeAll, err, fewer)
}

// quiet is a test within a test. Its clean-up runs when it ends.
type quiet struct {
	testing.TB
	undo []func()
}

func (q *quiet) Cleanup(f func()) { q.undo = append(q.undo, f) }

func (q *quiet) cleanup() {
	for i := len(q.undo) - 1; i >= 0; i-- {
		q.undo[i]()
	}
}

func difference(got, want string) string {
	count := map[string]int{}
	for l := range strings.Lines(got) {
		count[l]++
	}
	for l := range strings.Lines(want) {
		count[l]--
	}
	var b strings.Builder
	for _, text := range []struct{ text, sign string }{{got, "+ "}, {want, "- "}} {
		for l := range strings.Lines(text.text) {
			if n := count[l]; n > 0 && text.sign == "+ " || n < 0 && text.sign == "- " {
				b.WriteString(text.sign + l)
			}
		}
	}
	return b.String()
}
