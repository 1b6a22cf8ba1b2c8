//go:build linux

package wholeagent

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// scriptedKubeProxy writes the rules of the Service web as a kube-proxy does: a sync adds what
// is missing, replaces what differs, and leaves the rest of its tables. It runs for IPv4 only.
type scriptedKubeProxy struct {
	t      *testing.T
	node   *netlab.Host
	mode   string
	closed []func()
	mu     sync.Mutex
}

// startKubeProxy starts a kube-proxy on a node, with endpoints of the Service web. With ports, it
// serves its health check and its mode.
func startKubeProxy(t *testing.T, node *netlab.Host, mode string, ports bool, ips ...string) *scriptedKubeProxy {
	t.Helper()
	p := &scriptedKubeProxy{t: t, node: node, mode: mode}
	if ports {
		p.serve("127.0.0.1:10249", p.mode)
		p.serve("0.0.0.0:10256", `{"lastUpdated":"2026-11-23T12:00:00Z","currentTime":"2026-11-23T12:00:00Z","nodeEligible":true}`)
	}
	p.sync(ips...)
	p.t.Cleanup(p.stop)
	return p
}

// serve answers every request at an address, except that kube-proxy has no /readyz.
func (p *scriptedKubeProxy) serve(addr, text string) {
	p.t.Helper()
	l := must.Get(p.node.Listen("tcp", addr))(p.t)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	})}
	go s.Serve(l)
	p.closed = append(p.closed, func() { s.Close() })
}

// stop ends kube-proxy. Its rules stay.
func (p *scriptedKubeProxy) stop() {
	for _, f := range p.closed {
		f()
	}
	p.closed = nil
}

// sync brings the rules up to date.
func (p *scriptedKubeProxy) sync(ips ...string) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode == "ipvs" {
		p.run("sh", append([]string{"testdata/kubeproxy-ipvs.sh"}, ips...)...)
		return
	}
	dir := p.t.TempDir()
	if p.mode == "nftables" {
		put(p.t, dir, "rules", kubeProxyTable(ips))
		p.run("nft", "-f", dir+"/rules")
		return
	}
	put(p.t, dir, "rules", kubeProxyChains(ips))
	script := "iptables-restore -w 10 --noflush <" + dir + "/rules\n"
	for _, hook := range kubeProxyHooks {
		script += fmt.Sprintf("iptables -w 10 %s 2>/dev/null || iptables -w 10 %s\n", strings.Replace(hook, "-I ", "-C ", 1), hook)
	}
	p.run("sh", "-e", "-c", script)
}

func (p *scriptedKubeProxy) run(name string, args ...string) {
	p.t.Helper()
	if out, err := p.node.Run(p.t, name, args...); err != nil {
		p.t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// kubeProxyTable returns the transaction that gives the Service web endpoints in kube-proxy's
// nftables mode.
func kubeProxyTable(ips []string) string {
	const service = "service-SUSTUHLJ-default/web/tcp/http"
	var b, known, drawn strings.Builder
	b.WriteString(`add table ip kube-proxy
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority dstnat ; }
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority srcnat ; }
add chain ip kube-proxy services
add chain ip kube-proxy ` + service + `
flush chain ip kube-proxy nat-prerouting
flush chain ip kube-proxy nat-output
flush chain ip kube-proxy nat-postrouting
flush chain ip kube-proxy services
flush chain ip kube-proxy ` + service + `
add rule ip kube-proxy nat-prerouting jump services
add rule ip kube-proxy nat-output jump services
add rule ip kube-proxy nat-postrouting mark and 0x4000 != 0 mark set mark xor 0x4000 masquerade
add rule ip kube-proxy services ip daddr 10.96.0.10 tcp dport 80 goto ` + service + `
add rule ip kube-proxy services ip daddr 192.0.2.1 tcp dport 30080 goto ` + service + "\n")
	for i, ip := range ips {
		name := fmt.Sprintf("ABCDEFG%d-default/web/tcp/http__%s/8080", i, ip)
		fmt.Fprintf(&b, `add set ip kube-proxy affinity-%[1]s { type ipv4_addr ; flags dynamic,timeout ; timeout 3h ; }
add chain ip kube-proxy endpoint-%[1]s
flush chain ip kube-proxy endpoint-%[1]s
add rule ip kube-proxy endpoint-%[1]s update @affinity-%[1]s { ip saddr }
add rule ip kube-proxy endpoint-%[1]s meta l4proto tcp mark set mark or 0x4000 dnat to %s:8080
`, name, ip)
		fmt.Fprintf(&known, "add rule ip kube-proxy %s ip saddr @affinity-%s goto endpoint-%s\n", service, name, name)
		fmt.Fprintf(&drawn, " %d : goto endpoint-%s,", i, name)
	}
	fmt.Fprintf(&b, "%sadd rule ip kube-proxy %s numgen random mod %d vmap {%s }\n", known.String(), service, len(ips), strings.TrimSuffix(drawn.String(), ","))
	return b.String()
}

// kubeProxyHooks are the jumps that kube-proxy's mode iptables adds where they are missing.
var kubeProxyHooks = []string{
	`-t filter -I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
	`-t filter -I OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
	`-t nat -I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
	`-t nat -I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`,
	`-t nat -I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`,
}

// kubeProxyChains returns the input of iptables-restore that gives the Service web endpoints in
// kube-proxy's mode iptables.
func kubeProxyChains(ips []string) string {
	var chains, rules strings.Builder
	for _, ip := range ips {
		fmt.Fprintf(&rules, "-A KUBE-SVC-CDGGSHYLG3RE2FKL -m recent --rcheck --seconds 10800 --reap --name %[1]s --mask 255.255.255.255 --rsource -j %[1]s\n", kubeProxyEndpointChains[ip])
	}
	for i, ip := range ips {
		sep := kubeProxyEndpointChains[ip]
		fmt.Fprintf(&chains, ":%s - [0:0]\n", sep)
		draw := ""
		if left := len(ips) - i; left > 1 {
			draw = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(left))
		}
		fmt.Fprintf(&rules, "-A KUBE-SVC-CDGGSHYLG3RE2FKL -m comment --comment \"default/web:http -> %s:8080\" %s-j %s\n", ip, draw, sep)
		fmt.Fprintf(&rules, "-A %s -p tcp -m comment --comment default/web:http -m recent --set --name %[1]s --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination %[2]s:8080\n", sep, ip)
	}
	return `*filter
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-EXT-CDGGSHYLG3RE2FKL - [0:0]
:KUBE-SVC-CDGGSHYLG3RE2FKL - [0:0]
:KUBE-SVC-OLDOLDOLDOLDOLDO - [0:0]
` + chains.String() + `-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m comment --comment default/web:http -m tcp --dport 30080 -j KUBE-EXT-CDGGSHYLG3RE2FKL
-A KUBE-EXT-CDGGSHYLG3RE2FKL -j KUBE-MARK-MASQ
-A KUBE-EXT-CDGGSHYLG3RE2FKL -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-SVC-CDGGSHYLG3RE2FKL -m comment --comment "default/web:http cluster IP" -j KUBE-MARK-MASQ
` + rules.String() + "COMMIT\n"
}

// kubeProxyEndpointChains holds the chains of the endpoints of the Service web, whose names are
// hashes.
var kubeProxyEndpointChains = map[string]string{
	podIPs[0]: "KUBE-SEP-IMFC5XQKDZMFROSF", podIPs[1]: "KUBE-SEP-KWIA54J3D4XB7XP3", podIPs[2]: "KUBE-SEP-THIRDTHIRDTHIRD",
}
