//go:build linux

package wholeagent

import (
	"fmt"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/stall"
)

// syncIPVS brings the rules of kube-proxy's mode ipvs up to date, as that kube-proxy does: it adds what
// is missing and flushes its chains, but not those of others.
func (p *scriptedKubeProxy) syncIPVS(dir string, ips []string) {
	p.t.Helper()
	var b strings.Builder
	b.WriteString("set -e\nip link add kube-ipvs0 type dummy 2>/dev/null || true\nip addr replace 10.96.0.10/32 dev kube-ipvs0\n")
	for _, vs := range []string{clusterVIP, nodePort, "10.1.0.1:30080"} {
		fmt.Fprintf(&b, "ipvsadm -A -t %s -s rr 2>/dev/null || true\n", vs)
		for _, ip := range ips {
			fmt.Fprintf(&b, "ipvsadm -a -t %s -r %s:8080 -m -w 1 2>/dev/null || ipvsadm -e -t %s -r %s:8080 -m -w 1\n", vs, ip, vs, ip)
		}
		for _, ip := range podIPs {
			if !strings.Contains(strings.Join(ips, " "), ip) {
				fmt.Fprintf(&b, "ipvsadm -d -t %s -r %s:8080 2>/dev/null || true\n", vs, ip)
			}
		}
	}
	// The sets and chains are those of kubeProxyIPVS.
	_, rest, _ := strings.Cut(kubeProxyIPVS, "ipset restore")
	sets, rest, _ := strings.Cut(rest, "EOF\n\nipvsadm")
	_, chains, _ := strings.Cut(rest, "EOF\n\n")
	b.WriteString("ipset restore -exist" + sets + "EOF\n")
	var hooks strings.Builder
	table := ""
	for line := range strings.Lines(chains) {
		switch {
		case strings.HasPrefix(line, "*"):
			table = strings.TrimSpace(line[1:])
		case strings.HasPrefix(line, "ip6tables"):
			table = ""
		}
		if strings.HasPrefix(line, "-I ") {
			if table != "" && !strings.Contains(b.String(), "ip6tables-restore") {
				rule := strings.TrimSpace(line[len("-I "):])
				fmt.Fprintf(&hooks, "iptables -w -t %s -C %s 2>/dev/null || iptables -w -t %s -I %s\n", table, rule, table, rule)
			}
			continue
		}
		b.WriteString(line)
	}
	b.WriteString(hooks.String())
	put(p.t, dir, "ipvs", b.String())
	p.run("sh", dir+"/ipvs")
}

// takeOverIPVS takes a node over from a kube-proxy in mode ipvs that runs, and then ends.
func takeOverIPVS(t *testing.T) {
	for _, to := range []string{"nftables", "iptables", "ipvs"} {
		t.Run("to="+to, func(t *testing.T) {
			s := newSite(t)
			dir := t.TempDir()
			rollOut(t, dir, podIPs[0])
			old := startKubeProxy(t, s.Node, "ipvs", true, podIPs[0])
			stream := briefStream(t, s)
			stream.Next(10)
			p := start(t, s.Node, agentArgs(dir, to, "--adopt-from-kube-proxy", "--cluster-cidr", "10.1.0.0/16")...)
			waits := to != "nftables"
			if waits {
				p.logged(t, "kube-proxy runs and writes the same rules")
			} else {
				p.synced(t, "services=1 endpoints=1 changed=1")
				p.logged(t, "another proxy runs")
			}
			held(t, stream, "when both run")
			old.sync(podIPs[1])
			rollOut(t, dir, podIPs[1])
			if !waits {
				p.synced(t, "services=1 endpoints=1 changed=1")
			}
			held(t, stream, "after a change while both run")
			s.answeredBy(t, clusterVIP, podIPs[1])
			old.stop()
			if waits {
				p.synced(t, "services=1 endpoints=1 changed=1")
			}
			held(t, stream, "when kube-proxy has ended")
			rollOut(t, dir, podIPs[2])
			p.synced(t, "services=1 endpoints=1 changed=1")
			s.answeredBy(t, clusterVIP, podIPs[2])
			s.answeredBy(t, nodePort, podIPs[2])
			held(t, stream, "at the end")
			stream.Stop()
			p.logged(t, `"removing the rules of a proxy that has ended" proxy="kube-proxy" mode="ipvs"`) // adoptIPVS waits for the end
			if log := p.log(); strings.Contains(log, `proxy="kube-proxy" mode="iptables"`) {
				t.Errorf("kube-proxy's mode was ipvs, log:\n%s", log)
			}
		})
	}
}

// leaveForIPVS ends the agent in mode nftables, starts a kube-proxy in mode ipvs and cleans up.
func leaveForIPVS(t *testing.T) {
	s := newSite(t)
	dir := t.TempDir()
	rollOut(t, dir, podIPs[0])
	p := start(t, s.Node, agentArgs(dir, "nftables", "--cluster-cidr", "10.1.0.0/16")...)
	p.synced(t, "services=1 endpoints=1 changed=1")
	stream := briefStream(t, s)
	stream.Next(10)
	p.stop(t)
	held(t, stream, "when the agent has ended")
	now := startKubeProxy(t, s.Node, "ipvs", true, podIPs[0])
	held(t, stream, "when kube-proxy has started")
	cleanup(t, s.Node)
	held(t, stream, "after --cleanup")
	now.sync(podIPs[1])
	held(t, stream, "after a change")
	s.answeredBy(t, clusterVIP, podIPs[1])
	stream.Stop()
}

// briefStream opens connections to the Service web that IPVS forgets soon. It excuses the few that
// fail while the emulated machine stands still, and reports their number.
func briefStream(t *testing.T, s *site) *lab.Stream {
	t.Helper()
	stalls := stall.Start()
	stream := lab.StartStream(&lab.Stream{Visit: visitBriefly, Stalls: stalls}, s.Client, clusterVIP, s.Client, nodePort)
	t.Cleanup(func() {
		stalls.Stop()
		n, total := stalls.Stalls()
		excused := stream.Excused()
		t.Logf("%d failed connections were excused; the machine stood still %d times, for %v", excused, n, total)
		if excused > 2 {
			t.Errorf("%d connections failed while the machine stood still, which is too many to excuse", excused)
		}
	})
	return stream
}
