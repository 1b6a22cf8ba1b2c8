//go:build linux

package wholeagent

import (
	"fmt"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestPagesBesideTheMetricsAreServed reads the pages of the metrics server, and compares the
// metrics about iptables with the kernel.
func TestPagesBesideTheMetricsAreServed(t *testing.T) {
	t.Parallel()
	needMode(t, "iptables")
	s := newSite(t)
	p, dir := s.serveWeb(t, podIPs, "--min-sync-period", "0s", "--proxy-mode", "iptables", "--metrics-bind-address", "192.0.2.1:10249")
	const at = "http://192.0.2.1:10249"
	page := func(path string, want ...string) {
		t.Helper()
		eventually(t, path+" has "+strings.Join(want, ", "), func() bool {
			code, text, _ := get(t, s.Client, at+path)
			for _, w := range want {
				if code != 200 || !strings.Contains(text, w) {
					return false
				}
			}
			return true
		})
	}
	rules := func(table string) (n int) {
		t.Helper()
		text, err := s.Node.Run(t, "iptables-save", "-t", table)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(text, "\n-A KUBE-") - strings.Count(text, "\n-A KUBE-PROXY-CANARY ")
	}
	metric := func(name, table string, value int) string {
		return fmt.Sprintf("\nkubeproxy_sync_proxy_rules_iptables_%s{ip_family=\"IPv4\",table=%q} %d\n", name, table, value)
	}
	nat, filter := rules("nat"), rules("filter")
	if nat < 10 || filter < 5 {
		t.Fatalf("the kernel has %d and %d rules", nat, filter)
	}
	page("/metrics", metric("total", "nat", nat), metric("total", "filter", filter), metric("last", "nat", nat), metric("last", "filter", filter))
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[:2]...))
	p.synced(t, "services=1 endpoints=2 changed=1")
	page("/metrics", metric("total", "nat", rules("nat")), metric("total", "filter", filter), metric("last", "filter", 0))

	page("/healthz", "ok")
	page("/metrics/slis", "\nkubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n", `kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} `)
	page("/flagz", "nodeproxy flagz\n", "\nproxy-mode=iptables\n", "\nmasquerade-all=false\n", "\nmanifests="+dir+"\n")
	page("/statusz", "nodeproxy statusz\n", "\nMode: iptables\n", "\nFamilies: [IPv4 IPv6]\n", "/metrics/slis")
	page("/proxyMode", "iptables")

	// Every scrape reads the counters of the rules.
	text, err := s.Node.Run(t, "iptables-save", "-t", "filter")
	if err != nil {
		t.Fatal(err)
	}
	netlab.Need(t, strings.Contains(text, "--nfacct-name"), "nfacct in kernel and iptables")
	for n := range 3 {
		page("/metrics", "\nkubeproxy_iptables_ct_state_invalid_dropped_packets_total ",
			fmt.Sprintf("\nkubeproxy_iptables_localhost_nodeports_accepted_packets_total %d\n", n))
		// The first packet is counted, even if a busy machine answers it too late.
		if _, _, err := lab.Visit(s.Node, "", "127.0.0.1:30080"); err != nil {
			t.Log(err)
		}
	}
}
