//go:build linux

package wholeagent

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// readOnlyEnv makes /proc/sys read-only for a nodeproxy that startWith starts, as in a
// container that is not privileged.
const readOnlyEnv = "NODEPROXY_TEST_READ_ONLY"

// readOnlySysctls makes /proc/sys read-only in this process's mount namespace, once.
func readOnlySysctls() error {
	const dir = "/proc/sys"
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("remount: %w", err)
	}
	if err := os.WriteFile(dir+"/net/ipv4/ip_forward", []byte("1"), 0); !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("writing a sysctl: %w, want EROFS", err)
	}
	return os.Unsetenv(readOnlyEnv)
}

// sysctl returns a kernel parameter of a host.
func sysctl(t *testing.T, h *netlab.Host, name string) string {
	t.Helper()
	value := must.Get(h.Output("cat", "/proc/sys/"+name))(t)
	return strings.TrimSpace(value)
}

// TestInitOnlySetsAllParameters serves with a read-only /proc/sys after --init-only has set
// the parameters.
func TestInitOnlySetsAllParameters(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			testInitOnly(t, mode)
		})
	}
}

func testInitOnly(t *testing.T, mode string) {
	s, dir := webSite(t, podIPs...)
	// The limit of connections cannot be set in a network namespace.
	flags := []string{"--proxy-mode", mode, "--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "3h", "--ipvs-strict-arp"}
	set := map[string]string{"net/netfilter/nf_conntrack_tcp_timeout_established": "10800"}
	switch mode {
	case "iptables":
		set["net/ipv4/conf/all/route_localnet"] = "1"
	case "ipvs":
		for _, name := range []string{"vs/conntrack", "vs/expire_nodest_conn", "vs/expire_quiescent_template", "ip_forward", "conf/all/arp_ignore"} {
			set["net/ipv4/"+name] = "1"
		}
		set["net/ipv4/conf/all/arp_announce"] = "2"
		must.Do(t, s.Node.Sysctl("net/ipv4/ip_forward", "0"))
	}
	// The second run must not write a parameter that is already set.
	for range 2 {
		if code, _, log := verb(t, s.Node, append([]string{"run", "--init-only"}, flags...)...); code != 0 {
			t.Fatalf("--init-only: exit status %d, log:\n%s", code, log)
		}
		for name, want := range set {
			if got := sysctl(t, s.Node, name); got != want {
				t.Errorf("--init-only: %s is %s, want %s", name, got, want)
			}
		}
	}
	p := startWith(t, s.Node, []string{readOnlyEnv + "=1"}, append([]string{"run", "--init-only"}, flags...)...)
	if code, _ := p.exit(t); code != 0 {
		t.Errorf("--init-only with nothing to do: exit status %d, log:\n%s", code, p.log())
	}

	p = startWith(t, s.Node, []string{readOnlyEnv + "=1"}, append([]string{"run", "--manifests", dir, "--hostname-override", "n1"}, flags...)...)
	p.synced(t, "services=1 endpoints=3 changed=1")
	s.answeredBy(t, clusterVIP, podIPs...)
	s.answeredBy(t, nodePort, podIPs...)
	if mode == "iptables" {
		if y := lab.Visits(s.Node, "", "127.0.0.1:30080", 60); !y.Answered(podIPs...) {
			t.Errorf("the NodePort at the loopback address is answered by %v, want %v", y, podIPs)
		}
	}
	if p.loggedErrors() {
		t.Errorf("errors were logged:\n%s", p.log())
	}
	for _, bad := range []string{"read-only", "kernel parameter"} {
		if strings.Contains(p.log(), bad) {
			t.Errorf("log has %q:\n%s", bad, p.log())
		}
	}
}

// TestDisabledIPv6IsNotServed runs on a node where IPv6 is turned off.
func TestDisabledIPv6IsNotServed(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			testDisabledIPv6(t, mode)
		})
	}
}

func testDisabledIPv6(t *testing.T, mode string) {
	s := newSite(t)
	must.Do(t, s.Node.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	dir := t.TempDir()
	dual := strings.Replace(webService, "spec:\n", "spec:\n  ipFamilyPolicy: RequireDualStack\n  ipFamilies: [IPv4, IPv6]\n  clusterIPs: [10.96.0.10, 'fd00:10:96::10']\n", 1)
	six := strings.NewReplacer("web-1", "web-2", "IPv4", "IPv6", "10.1.0.2", "fd00:10:1::2").Replace(webSlice(podIPs[0]))
	put(t, dir, "web.yaml", dual+"---\n"+webSlice(podIPs...)+"---\n"+six)
	var flags []string
	if mode == "nftables" {
		// kube-proxy has a table for IPv6, too, which is removed.
		netlab.NeedPrograms(t, "nft")
		startKubeProxy(t, s.Node, "nftables", false, podIPs[0])
		must.Get(s.Node.Run(t, "nft", "add table ip6 kube-proxy; add chain ip6 kube-proxy services"))(t)
		flags = []string{"--adopt-from-kube-proxy"}
	}
	p := embed(t, s.Node, append([]string{"run", "--manifests", dir + "/web.yaml", "--hostname-override", "n1", "--proxy-mode", mode}, flags...)...)
	p.synced(t, "services=1 endpoints=3 changed=1")
	s.answeredBy(t, clusterVIP, podIPs...)
	s.answeredBy(t, nodePort, podIPs...)
	p.logged(t, `families="[IPv4]" `)
	p.logged(t, "this node cannot serve an address family")
	if log := p.log(); p.loggedErrors() || strings.Contains(log, "net/ipv6/conf/all/forwarding") {
		t.Errorf("log:\n%s", log)
	}
	if mode == "nftables" {
		eventually(t, "no chain of kube-proxy is left", func() bool { return !slices.Contains(chainsOfKubeProxy(t, s.Node, "ip6"), "services") })
		s.explains(t, dir, "nftables", 0, "kernel: agrees")
		if tables, err := s.Node.Run(t, "nft", "list", "tables"); err != nil || strings.Contains(tables, "ip6 proxier") {
			t.Errorf("error %v, tables:\n%s", err, tables)
		}
		return
	}
	if rules, err := s.Node.Run(t, "ip6tables-save"); err != nil || strings.Contains(rules, "KUBE-") {
		t.Errorf("error %v, rules for IPv6:\n%s", err, rules)
	}
}
