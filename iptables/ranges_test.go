package iptables

import (
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/tracker"
	"k8s.io/apimachinery/pkg/types"
)

// TestRangesComeAndGo adds, changes and removes ranges of ports. A restart must write nothing, and
// without ranges no chain and no rule may be left.
func TestRangesComeAndGo(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r, w := newWatched(t, flavor)
		has := func(what, chain, text string, want bool) {
			t.Helper()
			rules := r.kernel(tracker.IPv4)[chain]
			if got := slices.ContainsFunc(rules, func(rule string) bool { return strings.Contains(rule, text) }); got != want {
				t.Errorf("%s: %s has %q: %t, want %t, among\n%s", what, chain, text, got, want, strings.Join(rules, "\n"))
			}
		}
		check := func(what string) {
			t.Helper()
			r.sync()
			r.verify()
			r.start()
			w.calls()
			r.sync()
			if calls := w.calls(); !slices.Equal(calls, []string{""}) {
				t.Errorf("%s: a restart wrote %q", what, calls)
			}
			r.verify()
		}
		r.set(0, nil)
		r.set(1, []int{1}, externalIPs, nodePort(30001), portRange(9000, 0), affinity(60))
		check("a range")
		has("a range", "nat KUBE-SERVICES", "-j KUBE-SVC-RANGES", true)
		has("a range", "nat KUBE-SVC-RANGES", "--dport 80:9000 -j KUBE-SVC-", true)
		has("a range", "nat KUBE-SVC-SINGLE", "--dport 80 -j ACCEPT", true)
		has("a range", "filter KUBE-EXTERNAL-SERVICES", "-j KUBE-REFUSED-RANGES", true)
		// Many ranges of one address cannot be divided.
		for i := range firstRules + leafRules {
			s := svc(2, portRange(1000+10*i+9, 2000), externalIPs)
			s.Name, s.Spec.Ports[0].Port = s.Name+"-"+string(rune('a'+i/26))+string(rune('a'+i%26)), int32(1000+10*i)
			s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
			r.tracker.SetService(s)
		}
		r.set(3, []int{3}, portRange(65535, 0))
		check("many ranges")
		for chain, rules := range r.kernel(tracker.IPv4) {
			for _, rule := range rules {
				if to := iptext.Target(rule); strings.HasPrefix(to, "KUBE-RRNG-") && strings.Contains(rule, "--dport") {
					t.Errorf("%s divides ranges by their first port: %s", chain, rule)
				}
			}
		}
		r.set(1, []int{1}, externalIPs, nodePort(30001))
		r.set(3, []int{3}, portRange(9000, 8000))
		check("a single port again")
		has("a single port again", "nat KUBE-SERVICES", "--dport 80 -j KUBE-EXT-", true)
		for i := range firstRules + leafRules {
			s := svc(2)
			s.Name += "-" + string(rune('a'+i/26)) + string(rune('a'+i%26))
			r.tracker.DeleteService(types.NamespacedName{Namespace: s.Namespace, Name: s.Name})
		}
		r.set(3, []int{3})
		check("no ranges")
		for chain, rules := range r.kernel(tracker.IPv4) {
			if strings.Contains(chain, "RANGES") || strings.Contains(chain, "SINGLE") || strings.Contains(strings.Join(rules, ""), "RANGES") {
				t.Errorf("%s is left: %q", chain, rules)
			}
		}
	})
}
