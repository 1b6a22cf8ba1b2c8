package conformance_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// nothing returns a backend that does nothing.
func nothing(testing.TB, conformance.Env) ruleset.Backend {
	return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
}

// TestChurnReportsFailures connects to addresses that need no backend: those of pods.
func TestChurnReportsFailures(t *testing.T) {
	t.Parallel()
	w := conformance.NewWorld(t, conformance.Options{New: nothing})
	var served, closed []conformance.Target
	for _, p := range w.Pods() {
		for _, f := range w.Env.Families {
			for _, proto := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
				served = append(served, conformance.Target{Addr: netip.AddrPortFrom(p.Addr(f), p.Ports()[0]), Protocol: proto})
				closed = append(closed, conformance.Target{Addr: netip.AddrPortFrom(p.Addr(f), 1), Protocol: proto})
			}
		}
	}
	ran := false
	c := w.Churn(served, func() { ran = true })
	// From a client and a pod, before f and after.
	if want := 2 * 2 * len(served); !ran || c.Opened < want || len(c.Failures) != 0 {
		t.Errorf("opened %d, at least %d expected; failures %v", c.Opened, want, c.Failures)
	}
	c = w.Churn(closed, func() {})
	if want := 2 * 2 * len(closed); c.Opened != 0 || len(c.Failures) < want {
		t.Errorf("opened %d, %d failures", c.Opened, len(c.Failures))
	}
	for _, err := range c.Failures {
		if !strings.HasSuffix(err.Error(), ": refused") {
			t.Error(err)
		}
	}
}

// TestHeldConnectionBreaks holds connections to pods and disconnects one pod.
func TestHeldConnectionBreaks(t *testing.T) {
	t.Parallel()
	w := conformance.NewWorld(t, conformance.Options{New: nothing, Families: []tracker.Family{tracker.IPv4}})
	var to []conformance.Target
	for _, p := range w.Pods() {
		to = append(to, conformance.Target{Addr: netip.AddrPortFrom(p.Addr(tracker.IPv4), p.Ports()[0]), Protocol: v1.ProtocolTCP})
	}
	h := w.Hold(append(to, conformance.Target{Addr: to[0].Addr, Protocol: v1.ProtocolUDP}))
	for range 2 {
		if err := h.Check(); err != nil || h.Len() < 2*len(to) || h.Len()%len(to) != 0 {
			t.Fatalf("%d connections to %d pods, %v", h.Len(), len(to), err)
		}
	}
	script := "table ip t { chain c { type filter hook forward priority 0; meta l4proto tcp ip daddr " + to[1].Addr.Addr().String() + " reject with tcp reset; }; }"
	must.Do(t, w.Do(netlab.Command(t, "nft", script).Run))
	err := h.Check()
	if err == nil {
		t.Fatal("the connections of a disconnected pod still work")
	}
	for line := range strings.Lines(err.Error()) {
		if !strings.Contains(line, "served by "+to[1].Addr.String()) {
			t.Error(line)
		}
	}
}

// TestHeldTrafficSurvivesInterruption sends on connections while a pod is
// disconnected, and splits them by masquerading.
func TestHeldTrafficSurvivesInterruption(t *testing.T) {
	t.Parallel()
	w := conformance.NewWorld(t, conformance.Options{New: nothing, Families: []tracker.Family{tracker.IPv4}})
	netlab.NeedPrograms(t, "nft")
	nft := func(script string) {
		t.Helper()
		must.Do(t, w.Do(netlab.Command(t, "nft", script).Run))
	}
	var to []conformance.Target
	for _, p := range w.Pods()[1:3] {
		to = append(to, conformance.Target{Addr: netip.AddrPortFrom(p.Addr(tracker.IPv4), p.Ports()[0]), Protocol: v1.ProtocolTCP})
	}
	first, second := to[0].Addr.Addr().String(), to[1].Addr.Addr().String()
	nft("table ip t { chain c { type filter hook forward priority 0; }; chain n { type nat hook postrouting priority 100; ip daddr " + second + " masquerade; }; }")
	h := w.Hold(to)
	masqueraded, others := h.Split()
	if n := h.Len() / 2; n == 0 || masqueraded.Len() != n || others.Len() != n {
		t.Errorf("of %d connections to two pods %d are masqueraded and %d are not", h.Len(), masqueraded.Len(), others.Len())
	}
	nft("add rule ip t c ip daddr " + first + " drop")
	for range 2 {
		if err := h.Send(); err != nil {
			t.Error(err)
		}
	}
	if err := masqueraded.Check(); err != nil {
		t.Error(err)
	}
	nft("flush chain ip t c")
	if err := h.Check(); err != nil {
		t.Error(err)
	}
	nft("add rule ip t c ip daddr " + first + " reject with tcp reset")
	if err := others.Check(); err == nil {
		t.Error("the connections of a disconnected pod still work")
	}
	if err := others.Send(); err == nil {
		t.Error("Send succeeded on a broken connection")
	}
	if err := masqueraded.Check(); err != nil {
		t.Error(err)
	}
}

// TestWorldDrivesBackend uses a World through its exported fields, with a backend
// that only reads.
func TestWorldDrivesBackend(t *testing.T) {
	t.Parallel()
	for _, families := range [][]tracker.Family{{tracker.IPv4}, {tracker.IPv6}, nil} {
		var got *ruleset.Delta
		var ns, here string
		w := conformance.NewWorld(t, conformance.Options{
			Families: families,
			New: func(_ testing.TB, env conformance.Env) ruleset.Backend {
				ns, _ = os.Readlink("/proc/thread-self/ns/net")
				return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
					got = d
					here, _ = os.Readlink("/proc/thread-self/ns/net")
					return nil
				})
			},
		})
		f := w.Env.Families[0]
		name, port := "http", int32(w.Pods()[0].Ports()[0])
		ip := netip.MustParseAddr("10.96.0.1")
		if f == tracker.IPv6 {
			ip = netip.MustParseAddr("fd00:10:96::1")
		}
		w.Tracker.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: v1.ServiceSpec{
				ClusterIP: ip.String(), ClusterIPs: []string{ip.String()}, IPFamilies: []v1.IPFamily{v1.IPFamily(f.String())},
				Ports: []v1.ServicePort{{Name: name, Port: 80}},
			},
		})
		slice := &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
			AddressType: discovery.AddressType(f.String()),
			Ports:       []discovery.EndpointPort{{Name: &name, Port: &port}},
		}
		for _, p := range w.Pods() {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{p.Addr(f).String()}, NodeName: &p.Node})
		}
		w.Tracker.SetSlice(slice)
		w.Sync()
		if got == nil || !got.Full || len(got.Changes) != 1 || len(got.Changes[0].New.Selection.Cluster) != len(w.Pods()) {
			t.Fatalf("families %v: delta %+v", families, got)
		}
		own, _ := os.Readlink("/proc/thread-self/ns/net")
		if ns == own || here != ns {
			t.Errorf("New ran in %s, Apply in %s, the test in %s", ns, here, own)
		}
	}
}

// TestSkippedFeaturesAreReported checks the output for a backend with few features.
func TestSkippedFeaturesAreReported(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	const env = "CONFORMANCE_TEST_SKIP"
	if os.Getenv(env) != "" {
		// The backend returns errors, because with an idle one all connections would time out.
		fails := func(testing.TB, conformance.Env) ruleset.Backend {
			return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return errors.ErrUnsupported })
		}
		conformance.Run(t, conformance.Options{New: fails, Skip: map[conformance.Feature]string{
			conformance.SCTP: "no need", conformance.SourceRanges: "not yet",
		}})
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.v", "-test.run", "^TestSkippedFeaturesAreReported$/^(source_ranges|cluster_IP_over_SCTP|both_policies_Local)$")
	cmd.Env = append(os.Environ(), env+"=1")
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Error("a backend without features has passed")
	}
	for _, want := range []string{
		"the backend does not support SCTP: no need", "--- SKIP: TestSkippedFeaturesAreReported/cluster_IP_over_SCTP",
		"the backend does not support source ranges: not yet", "--- SKIP: TestSkippedFeaturesAreReported/source_ranges",
		"--- FAIL: TestSkippedFeaturesAreReported/both_policies_Local", errors.ErrUnsupported.Error(),
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q is missing in:\n%s", want, out)
		}
	}
}

// TestIdleBackendFailsAtOnce checks that a backend that does nothing fails in the
// first sub-test, and that the others are skipped.
func TestIdleBackendFailsAtOnce(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	const env = "CONFORMANCE_TEST_NOTHING"
	if os.Getenv(env) != "" {
		o := conformance.Options{New: nothing}
		t.Run("Run", func(t *testing.T) { conformance.Run(t, o) })
		t.Run("RunRandom", func(t *testing.T) { conformance.RunRandom(t, o, conformance.Random{}) })
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.v", "-test.run", "^TestIdleBackendFailsAtOnce$")
	cmd.Env = append(os.Environ(), env+"=1")
	start := time.Now()
	out, err := cmd.CombinedOutput()
	t.Logf("took %v", time.Since(start))
	if n := strings.Count(string(out), "the backend forwards nothing"); err == nil || n != 2 {
		t.Errorf("%d of 2 messages (%v):\n%s", n, err, out)
	}
	for _, not := range []string{"TestIdleBackendFailsAtOnce/Run/cluster_IP", "seed="} {
		if strings.Contains(string(out), not) {
			t.Errorf("%q runs too:\n%s", not, out)
		}
	}
}
