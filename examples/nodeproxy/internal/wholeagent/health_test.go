//go:build linux

package wholeagent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// TestRulesDeletedDuringWritesAreBackSoon deletes all rules before each write of the agent, so that its
// syncs fail, and then no longer. The usual retry comes after an hour.
func TestRulesDeletedDuringWritesAreBackSoon(t *testing.T) {
	t.Parallel()
	needMode(t, "iptables")
	s := newSite(t)
	dir := t.TempDir()
	armed := filepath.Join(dir, "armed")
	for _, family := range []string{"iptables", "ip6tables"} {
		restore, err := exec.LookPath(family + "-nft-restore")
		netlab.Need(t, err == nil, "iptables-nft-restore")
		script := fmt.Sprintf("#!/bin/sh\nin=%s/in.$$; cat >$in\nif [ -e %s ] && grep -q '^-[AI]' $in; then nft flush ruleset; fi\nexec %s \"$@\" <$in\n", dir, armed, restore)
		put(t, dir, family+"-nft-restore", script)
		must.Do(t, os.Chmod(filepath.Join(dir, family+"-nft-restore"), 0o755))
	}
	manifests := t.TempDir()
	put(t, manifests, "web.yaml", webService+"---\n"+webSlice(podIPs[0]))
	p := startWith(t, s.Node, []string{"PATH=" + dir + ":" + os.Getenv("PATH")}, "run", "--manifests", manifests, "--hostname-override", "n1",
		"--proxy-mode", "iptables", "--iptables-flavor", "nft", "--iptables-sync-period", "1h")
	p.synced(t, "services=1 endpoints=1 changed=1")
	const healthz, livez = "http://192.0.2.1:10256/healthz", "http://192.0.2.1:10256/livez"
	if code, body, _ := get(t, s.Client, healthz); code != 200 {
		t.Fatalf("/healthz: %d %s", code, body)
	}
	put(t, dir, "armed", "")
	wipeMode(t, s.Node, "nftables")
	eventually(t, "/healthz reports the missing rules", func() bool {
		code, body, _ := get(t, s.Client, healthz)
		return code == 503 && strings.Contains(body, "another process deleted rules in IPv4")
	})
	if code, body, _ := get(t, s.Client, livez); code != 200 {
		t.Errorf("/livez: %d %s", code, body)
	}
	must.Do(t, os.Remove(armed))
	eventually(t, "/healthz answers 200 again", status(t, s.Client, healthz, 200))
	s.answeredBy(t, clusterVIP, podIPs[0])
}

// TestHealthChecksAnswerByFamily sends requests to a Service's health-check node port, at the
// node's addresses of both families, while the Service's families and endpoints change.
func TestHealthChecksAnswerByFamily(t *testing.T) {
	t.Parallel()
	needMode(t, "nftables")
	for _, at := range []string{"primary", "0.0.0.0/0,::/0"} {
		t.Run(strings.ReplaceAll(at, "/", "-"), func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			s.Node.Addrs("eth0", "2001:db8::1/64")
			s.Client.Addrs("eth0", "2001:db8::9/64")
			slice := func(name, typ, ip, node string) string {
				return fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: lb-%s, labels: {kubernetes.io/service-name: lb}}
addressType: %s
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [%q], nodeName: %s}]
`, name, typ, ip, node)
			}
			world := func(families, ips, node4, node6 string) string {
				return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: lb}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 32000, clusterIP: %s, clusterIPs: [%s], ipFamilies: [%s], ports: [{name: http, port: 80, nodePort: 30080}]}
`, strings.Split(ips, ",")[0], ips, families) + slice("4", "IPv4", podIPs[0], node4) + slice("6", "IPv6", "fd00:1::1", node6)
			}
			const both, ips, ip4, ip6 = "IPv4, IPv6", "10.96.0.20, 'fd00:96::20'", "10.96.0.20", "'fd00:96::20'"
			dir := t.TempDir()
			put(t, dir, "lb.yaml", world(both, ips, "n1", "n2"))
			p := embed(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s",
				"--nodeport-addresses", at, "--healthz-bind-address", "", "--metrics-bind-address", "")
			for _, step := range []struct{ name, world, four, six string }{
				{"local endpoints in IPv4", "", "200 1", "503 0"},
				{"local endpoints in IPv6", world(both, ips, "n2", "n1"), "503 0", "200 1"},
				{"IPv4 only", world("IPv4", ip4, "n1", "n2"), "200 1", "200 1"},
				{"IPv4 only, local endpoints in IPv6", world("IPv4", ip4, "n2", "n1"), "503 0", "503 0"},
				{"IPv6 only", world("IPv6", ip6, "n2", "n1"), "200 1", "200 1"},
				{"dual-stack again", world(both, ips, "n1", "n2"), "200 1", "503 0"},
			} {
				if step.world != "" {
					put(t, dir, "lb.yaml", step.world)
				}
				var four, six string
				ask := func(host string) string {
					code, _, h := get(t, s.Client, "http://"+host+":32000/")
					return fmt.Sprint(code, " ", h.Get("X-Load-Balancing-Endpoint-Weight"))
				}
				for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
					four, six = ask("192.0.2.1"), ask("[2001:db8::1]")
					if four == step.four && six == step.six {
						break
					}
					if time.Now().After(end) {
						t.Fatalf("%s: %q at the IPv4 address, %q at the IPv6 address; want %q and %q; log:\n%s", step.name, four, six, step.four, step.six, p.log())
					}
				}
			}
		})
	}
}

// TestIdleConnectionsAreBounded opens 2,000 connections to each server of the agent. Its
// descriptors must stay bounded, and it must still answer.
func TestIdleConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	s, dir := webSite(t, podIPs[0])
	p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--metrics-bind-address", "192.0.2.1:10249")
	p.synced(t, "services=1 endpoints=1 changed=1")
	descriptors := func() int {
		t.Helper()
		list := must.Get(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Process.Pid)))(t)
		return len(list)
	}
	before := descriptors()
	for i, url := range []string{"192.0.2.1:10256", "192.0.2.1:10249"} {
		for range 2000 {
			conn := must.Get(lab.Dial(s.Client, "tcp", "", url, testtime.Timeout))(t)
			t.Cleanup(func() { conn.Close() })
		}
		if code, body, _ := get(t, s.Client, "http://"+url+"/healthz"); code != 200 {
			t.Errorf("%s: %d %s", url, code, body)
		}
		if n := descriptors(); n > before+(i+1)*512+10 {
			t.Errorf("%s: %d descriptors, %d before", url, n, before)
		}
	}
}

// TestFewFilesAreEnoughForTheAgent has 256 files, Services that need more sockets, and clients that open
// connections to all of them and to the agent's servers. The agent must answer, serve a new Service, and
// have files for the API server.
func TestFewFilesAreEnoughForTheAgent(t *testing.T) {
	t.Parallel()
	needMode(t, "nftables")
	const files, services, left = 256, 100, 60
	s := newSite(t)
	dir := t.TempDir()
	var tenant strings.Builder
	for i := range services {
		kind := "NodePort"
		if i < 20 {
			kind = fmt.Sprint("LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: ", 32000+i)
		}
		fmt.Fprintf(&tenant, `apiVersion: v1
kind: Service
metadata: {name: s%d, namespace: tenant}
spec: {type: %s, clusterIP: 10.96.1.%d, ports: [{name: http, port: 80, nodePort: %d}, {name: dns, port: 53, nodePort: %d, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s%[1]d, namespace: tenant, labels: {kubernetes.io/service-name: s%[1]d}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: dns, port: 8080, protocol: UDP}]
endpoints: [{addresses: [%[6]q], nodeName: n1}]
---
`, i, kind, i, 31000+i, 31000+services+i, podIPs[0])
	}
	put(t, dir, "tenant.yaml", tenant.String())
	p := startWith(t, s.Node, []string{filesEnv + "=" + strconv.Itoa(files)}, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s",
		"--nodeport-addresses", "192.0.2.0/24,127.0.0.0/8", "--metrics-bind-address", "192.0.2.1:10249")
	eventually(t, "the rules are in effect", status(t, s.Client, "http://192.0.2.1:10256/healthz", 200))
	flood := func(h *netlab.Host, network, to string) {
		c, err := lab.Dial(h, network, "", to, 200*time.Millisecond)
		if err != nil {
			return // not served
		}
		t.Cleanup(func() { c.Close() })
		if network == "udp" {
			c.Write([]byte("x"))
		}
	}
	for i := range 3 * services {
		flood(s.Node, "tcp", fmt.Sprint("127.0.0.1:", 31000+i%services))
		flood(s.Node, "udp", fmt.Sprint("127.0.0.1:", 31000+services+i%services))
		flood(s.Client, "tcp", fmt.Sprint("192.0.2.1:", 32000+i%20))
		flood(s.Client, "tcp", "192.0.2.1:10256")
		flood(s.Client, "tcp", "192.0.2.1:10249")
	}
	rollOut(t, dir, podIPs[0])
	eventually(t, "the new Service is served", func() bool { return lab.Visits(s.Client, "", clusterVIP, 1).Answered(podIPs[0]) })
	for _, port := range []string{"10256", "10249"} {
		if code, body, _ := get(t, s.Client, "http://192.0.2.1:"+port+"/healthz"); code != 200 {
			t.Errorf("port %s: %d %s", port, code, body)
		}
	}
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Process.Pid))
	t.Logf("%d files are open", len(list))
	if err != nil || len(list) > files-left {
		t.Errorf("%d of %d files are open, %v; at least %d must be left", len(list), files, err, left)
	}
	if strings.Contains(p.log(), "too many open files") {
		t.Errorf("log:\n%s", p.log())
	}
}

// TestPagesBesideTheMetricsAreServed reads the pages of the metrics server, and compares the
// metrics about iptables with the kernel.
func TestPagesBesideTheMetricsAreServed(t *testing.T) {
	t.Parallel()
	needMode(t, "iptables")
	s := newSite(t)
	p := s.serveWeb(t, podIPs, "--proxy-mode", "iptables", "--metrics-bind-address", "192.0.2.1:10249")
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
		text := must.Get(s.Node.Run(t, "iptables-save", "-t", table))(t)
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
	p.web(t, podIPs[:2]...)
	page("/metrics", metric("total", "nat", rules("nat")), metric("total", "filter", filter), metric("last", "filter", 0))

	page("/healthz", "ok")
	page("/metrics/slis", "\nkubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n", `kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} `)
	page("/flagz", "nodeproxy flagz\n", "\nproxy-mode=iptables\n", "\nmasquerade-all=false\n", "\nmanifests="+p.dir+"\n")
	page("/statusz", "nodeproxy statusz\n", "\nMode: iptables\n", "\nFamilies: [IPv4 IPv6]\n", "/metrics/slis")
	page("/proxyMode", "iptables")

	// Every scrape reads the counters of the rules.
	text := must.Get(s.Node.Run(t, "iptables-save", "-t", "filter"))(t)
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
