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
	must.Get(s.Node.Run(t, "nft", "flush ruleset"))(t)
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
