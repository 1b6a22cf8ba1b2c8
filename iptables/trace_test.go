package iptables

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestTakesOverFromIPVS writes rules of kube-proxy's ipvs mode into chains of the same names,
// which a full delta must remove, and a jump of another program, which must stay.
func TestTakesOverFromIPVS(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4)
		r.everyKind()
		r.sync()
		r.command(tracker.IPv4, "", "-N", "KUBE-SOURCE-RANGES-FIREWALL")
		r.command(tracker.IPv4, "", "-A", "KUBE-SOURCE-RANGES-FIREWALL", "-j", "DROP")
		r.command(tracker.IPv4, "", "-A", "KUBE-PROXY-FIREWALL", "-j", "KUBE-SOURCE-RANGES-FIREWALL")
		for _, chain := range []string{"INPUT", "FORWARD"} {
			r.command(tracker.IPv4, "", "-I", chain, "-m", "comment", "--comment", "kube-proxy firewall rules", "-j", "KUBE-PROXY-FIREWALL")
		}
		r.start()
		r.sync()
		r.verify()
		r.command(tracker.IPv4, "", "-A", "INPUT", "-s", "203.0.113.9/32", "-m", "comment", "--comment", "mine", "-j", "KUBE-PROXY-FIREWALL")
		r.start()
		r.sync()
		if got := r.kernel(tracker.IPv4)["filter INPUT"]; !slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, "-s 203.0.113.9/32 ") }) {
			t.Errorf("another program's rule is gone: %v", got)
		}
	})
}

// TestTraceCountsRules compares each Info with the written lines and with the kernel.
func TestTraceCountsRules(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		var infos []WriteInfo
		r := newRig(t, flavor, func(c *Config) {
			c.Hooks = &Hooks{Applied: func(i WriteInfo) { infos = append(infos, i) }}
		})
		check := func(what string, fullFor ...tracker.Family) {
			t.Helper()
			infos = nil
			r.node.calls()
			r.sync()
			written, table := map[string]int{}, ""
			for _, c := range r.node.calls() {
				program, line, _ := strings.Cut(c, " ")
				if strings.HasPrefix(line, "*") {
					table = line[1:]
				} else if strings.HasPrefix(line, "-A KUBE-") && !strings.HasPrefix(line, "-A "+chainCanary+" ") {
					written[program+" "+table]++
				}
			}
			i := 0
			for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				size := r.kernel(f).size()
				for table := range tables {
					if i >= len(infos) {
						t.Fatalf("%s: only %v", what, infos)
					}
					program := map[tracker.Family]string{tracker.IPv4: "iptables", tracker.IPv6: "ip6tables"}[f] + " " + table.String()
					want := WriteInfo{f, table.String(), size[table], written[program]}
					if infos[i] != want {
						t.Errorf("%s: %+v, want %+v", what, infos[i], want)
					}
					if slices.Contains(fullFor, f) && (want.Written == 0 || want.Written != want.Rules) {
						t.Errorf("%s: %+v, want all rules written", what, want)
					}
					i++
				}
			}
			if i != len(infos) {
				t.Errorf("%s: unexpected %+v", what, infos[i:])
			}
		}
		r.everyKind()
		check("first delta", tracker.IPv4, tracker.IPv6)
		r.cursor.Resync()
		check("resync")
		if slices.ContainsFunc(infos, func(i WriteInfo) bool { return i.Written != 0 }) {
			t.Errorf("a resync wrote: %+v", infos)
		}
		r.tracker.SetSlice(slice(0, tracker.IPv4, 1, 2, 3, 4, 5, 6))
		check("other endpoints")
		if infos[nat].Written == 0 || infos[filter].Written != 0 || infos[tables+nat].Written != 0 {
			t.Errorf("a change of IPv4 endpoints wrote %+v", infos)
		}
		r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-0"})
		check("a deleted Service")

		// A failed Apply is not traced.
		infos = nil
		r.node.set("refuse", "nat")
		r.tracker.SetSlice(slice(1, tracker.IPv4, 7))
		if err := r.cursor.Sync(t.Context()); err == nil || len(infos) != 0 {
			t.Errorf("error %v, traced %+v", err, infos)
		}
		r.node.set("", "")
		check("after a failure")
	})
}

// TestTransactionsAreLogged compares the log at LevelTransaction with what iptables-restore was called with.
func TestTransactionsAreLogged(t *testing.T) {
	t.Parallel()
	for _, level := range []slog.Level{dataplane.LevelTransaction, slog.LevelDebug} {
		var log bytes.Buffer
		r := newRig(t, system{NFT, true}, func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level}))
		})
		r.everyKind()
		r.node.calls()
		r.sync()
		var rules []string
		for _, line := range r.node.calls() {
			_, rule, _ := strings.Cut(line, " ")
			if strings.HasPrefix(rule, "-A KUBE-") && !strings.Contains(rule, `"`) { // the log quotes those
				rules = append(rules, rule)
			}
		}
		has := func(line string) bool { return strings.Contains(log.String(), line) }
		switch {
		case level == slog.LevelDebug && slices.ContainsFunc(rules, has):
			t.Error("the log has transactions at level DEBUG")
		case level != slog.LevelDebug && (len(rules) < 20 || slices.ContainsFunc(rules, func(l string) bool { return !has(l) })):
			t.Errorf("the log lacks some of %d rules", len(rules))
		}
	}
}
