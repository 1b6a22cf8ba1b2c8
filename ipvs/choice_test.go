//go:build linux

package ipvs

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// testEndpointsAreChosenEvenly counts connections by endpoint. The default scheduler must
// choose endpoints in turn, and Maglev's hash of the client's port uniformly.
func testEndpointsAreChosenEvenly(f *faultWorld) {
	t := f.t
	setPods(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
	udp := f.targets[2]
	count := func(n int) map[netip.AddrPort]int {
		out := map[netip.AddrPort]int{}
		for range n {
			server, err := f.Reach(udp, testtime.Timeout)
			if err != nil {
				t.Fatal(err)
			}
			out[server]++
		}
		return out
	}
	rounds := 5
	if got := count(rounds * len(f.pods)); len(got) != len(f.pods) {
		t.Errorf("%v", got)
	} else {
		for server, n := range got {
			if n != rounds {
				t.Errorf("%s was chosen %d times in %d rounds: %v", server, n, rounds, got)
			}
		}
	}
	b, err := New(t.Context(), Config{NetNS: f.Env.NetNS, Families: f.Env.Families, Scheduler: Maglev})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	c := f.Engine.Attach("maglev", b)
	defer c.Detach()
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	// This is Pearson's test. The table of mh is uniform to a hundredth, and the kernel's
	// hash has another key in each run. The critical values are for one false alarm in
	// 10^9, by degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods,
	// 1.3.6.7.4, has the formula).
	critical := map[int]float64{3: 44.84, 4: 47.88, 5: 50.69, 6: 53.34}
	const each = 25
	n := each * len(f.pods)
	got, chi := count(n), 0.0
	for _, p := range f.pods {
		d := float64(got[netip.MustParseAddrPort(p)] - each)
		chi += d * d / each
	}
	limit, ok := critical[len(f.pods)-1]
	if !ok {
		t.Fatalf("no critical value for %d pods", len(f.pods))
	}
	t.Logf("chi-squared %.1f over %d pods, at most %.1f allowed: %v", chi, len(f.pods), limit, got)
	if chi > limit {
		t.Errorf("chi-squared is %.1f, more than %.1f: %v", chi, limit, got)
	}
}

// testAffinityLasts connects several times within the timeout. The default scheduler sends
// a client without affinity to the next endpoint.
func testAffinityLasts(f *faultWorld) {
	t := f.t
	const timeout = 5 * time.Second
	s := svc(60, affinity(int32(timeout/time.Second)))
	f.Tracker.SetService(s)
	f.Tracker.SetSlice(podSlice(60, v1.ProtocolTCP, f.pods, len(f.pods), f.rng))
	f.Sync()
	to := conformance.Target{Addr: netip.MustParseAddrPort("10.96.0.60:80"), Protocol: v1.ProtocolTCP}
	last := time.Now()
	server, err := f.Reach(to, testtime.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, pause := range []time.Duration{0, timeout / 2, timeout * 4 / 5, timeout / 2} {
		time.Sleep(pause)
		// Changes of another Service must not affect the client.
		f.Tracker.SetSlice(podSlice(50, v1.ProtocolTCP, f.pods, 1, f.rng))
		f.Sync()
		start := time.Now()
		next, err := f.Reach(to, testtime.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		// If the machine was too slow for the timeout, the client may move.
		if after := time.Since(last); after < timeout {
			kept++
			if next != server {
				t.Errorf("after %v the client of %s was sent to %s", after.Round(time.Millisecond), server, next)
			}
		}
		last, server = start, next
	}
	t.Logf("the client returned within the timeout %d times of 4", kept)
}
