//go:build linux

package wholeagent

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
)

// stickySite returns a site with the addresses of 24 clients, and the folder of a Service with client
// affinity and two endpoints.
func stickySite(t *testing.T) (s *site, clients []string, dir string) {
	t.Helper()
	s = newSite(t)
	for i := range 24 {
		clients = append(clients, fmt.Sprintf("192.0.2.%d", 100+i))
		s.Client.Addrs("eth0", clients[i]+"/24")
	}
	dir = t.TempDir()
	service := strings.Replace(webService, "spec:\n", "spec:\n  sessionAffinity: ClientIP\n", 1)
	put(t, dir, "web.yaml", service+"---\n"+webSlice(podIPs[:2]...))
	return s, clients, dir
}

// TestClientsKeepTheirEndpointAtTakeOver takes a Service with client affinity over from a
// kube-proxy. Each client must keep the endpoint that kube-proxy chose for it.
func TestClientsKeepTheirEndpointAtTakeOver(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for _, tt := range []struct{ from, to string }{{"nftables", "nftables"}, {"iptables", "nftables"}, {"iptables", "iptables"}, {"nftables", "iptables"}} {
		t.Run(fmt.Sprintf("from=%s/to=%s", tt.from, tt.to), func(t *testing.T) {
			t.Parallel()
			s, clients, dir := stickySite(t)
			old := &scriptedKubeProxy{t: t, node: s.Node, mode: tt.from, affinity: true}
			old.start(true, podIPs[:2]...)
			visitAll := func() map[string]string {
				t.Helper()
				out := map[string]string{}
				for _, c := range clients {
					name, _, err := lab.Visit(s.Client, c, clusterVIP)
					if err != nil {
						t.Fatal(err)
					}
					out[c] = name
				}
				return out
			}
			before := visitAll()
			if again := visitAll(); !maps.Equal(before, again) {
				t.Fatalf("kube-proxy's rules of the test have no affinity: %v, then %v", before, again)
			}
			p := start(t, s.Node, agentArgs(dir, tt.to, "--adopt-from-kube-proxy")...)
			if tt.from != tt.to || tt.to != "iptables" {
				p.synced(t, "services=1 endpoints=2 changed=1")
				if now := visitAll(); !maps.Equal(before, now) {
					t.Errorf("while both run: %v, before %v", now, before)
				}
				old.stop()
			} else {
				p.logged(t, "kube-proxy runs and writes the same rules")
				old.stop()
				p.synced(t, "services=1 endpoints=2 changed=1")
			}
			eventually(t, "kube-proxy's rules are gone", func() bool {
				got := rules(t, s.Node)
				return !got["kube-proxy nftables"] && (tt.to == "iptables" || !got["iptables"])
			})
			if now := visitAll(); !maps.Equal(before, now) {
				t.Errorf("after the take-over: %v, before %v; log:\n%s", now, before, p.log())
			}
		})
	}
}

// TestClientsKeepTheirEndpointFromModeIPTables starts the agent in mode nftables after it ran in
// mode iptables.
func TestClientsKeepTheirEndpointFromModeIPTables(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	s, clients, dir := stickySite(t)
	visits := map[string]map[string]string{}
	for _, mode := range []string{"iptables", "nftables"} {
		p := start(t, s.Node, agentArgs(dir, mode)...)
		p.synced(t, "services=1 endpoints=2 changed=1")
		visits[mode] = map[string]string{}
		for _, c := range clients {
			name, _, err := lab.Visit(s.Client, c, clusterVIP)
			if err != nil {
				t.Fatal(err)
			}
			visits[mode][c] = name
		}
		p.stop(t)
	}
	if !maps.Equal(visits["iptables"], visits["nftables"]) {
		t.Errorf("endpoints of clients: %v", visits)
	}
}
