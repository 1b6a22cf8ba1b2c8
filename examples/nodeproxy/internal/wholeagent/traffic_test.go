//go:build linux

package wholeagent

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestTrafficMetricsMatchConnections makes connections through agents of two modes, one after
// the other, and compares their metrics with the number of connections, even after a restart
// and without endpoints.
func TestTrafficMetricsMatchConnections(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			s, dir := webSite(t, podIPs...)
			const at = "http://192.0.2.1:10249"
			run := func() *process {
				return embed(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s",
					"--proxy-mode", mode, "--metrics-bind-address", "192.0.2.1:10249", "--service-traffic-metrics")
			}
			labels := `{ip_family="IPv4",port="http",protocol="TCP",service="web",service_namespace="default"} `
			page := func(what string, want ...string) {
				t.Helper()
				eventually(t, what+": "+strings.Join(want, ", "), func() bool {
					code, text, _ := get(t, s.Client, at+"/metrics")
					for _, w := range want {
						if code != 200 || !strings.Contains(text, "\nproxier_service_"+w+"\n") {
							return false
						}
					}
					return true
				})
			}
			connect := func(n int) {
				t.Helper()
				for range n {
					c := must.Get(s.Client.Dial(t.Context(), "tcp", "", "10.96.0.10:80"))(t)
					_, _ = io.ReadAll(io.LimitReader(c, 1))
					c.Close()
				}
			}
			connections := func(n int) string { return fmt.Sprint("connections_total", labels, n) }
			p := run()
			p.synced(t, "services=1 endpoints=3 changed=1")
			page("before any connection", connections(0), "endpoints"+labels+"3")
			if mode == "nftables" {
				page("before any connection", "refused_packets_total"+labels+"0")
			}
			connect(5)
			page("first connections", connections(5), "endpoints"+labels+"3")
			rollOut(t, dir, podIPs[:2]...)
			p.synced(t, "services=1 endpoints=2 changed=1")
			connect(2)
			page("after a change of endpoints", connections(7), "endpoints"+labels+"2")
			p.stop(t)
			p = run()
			p.synced(t, "services=1 endpoints=2 changed=1")
			connect(1)
			page("after a restart", connections(8))
			put(t, dir, "web.yaml", webService)
			p.synced(t, "services=1 endpoints=0 changed=1")
			if mode != "nftables" {
				page("without endpoints", connections(8))
				return
			}
			if _, err := s.Client.Dial(t.Context(), "tcp", "", "10.96.0.10:80"); err == nil {
				t.Error("a Service without endpoints is served")
			}
			page("without endpoints", connections(8), "refused_packets_total"+labels+"1", "endpoints"+labels+"0")
		})
	}
}
