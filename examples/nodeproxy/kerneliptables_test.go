package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
)

func TestSplitRule(t *testing.T) {
	for line, want := range map[string]string{
		`-A X -j Y`: "-A|X|-j|Y",
		`-A X -m comment --comment "a \"b\" c" ! -s 10.0.0.0/8  -j Y`: `-A|X|-m|comment|--comment|a "b" c|!|-s|10.0.0.0/8|-j|Y`,
		`-A X --comment "" -j Y`: "-A|X|--comment||-j|Y",
		`"`:                      "",
	} {
		if got := strings.Join(splitRule(line), "|"); got != want {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
}

// TestNATWalk goes through rules as kube-proxy writes them.
func TestNATWalk(t *testing.T) {
	chains := natChains(`*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-EMPTY - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -j KUBE-EMPTY
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "ns/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-WEB
-A KUBE-SERVICES -d 203.0.113.1/32 -p tcp -m tcp --dport 80 -j KUBE-FW-WEB
-A KUBE-SERVICES -m comment --comment "NodePorts; must be last" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -d 127.0.0.0/8 -p tcp -m tcp --dport 30080 -m nfacct --nfacct-name  localhost_nps_accepted_pkts -j KUBE-EXT-WEB
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-WEB
-A KUBE-FW-WEB -s 192.0.2.0/24 -j KUBE-EXT-WEB
-A KUBE-EXT-WEB -s 10.1.0.0/16 -m comment --comment "pod traffic" -j KUBE-SVC-WEB
-A KUBE-EXT-WEB -m addrtype --src-type LOCAL -j KUBE-SVC-WEB
-A KUBE-EXT-WEB -j KUBE-SVL-WEB
-A KUBE-SVC-WEB ! -s 10.1.0.0/16 -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-WEB -m recent --rcheck --seconds 10 --reap --name KUBE-SEP-A --mask 255.255.255.255 --rsource -j KUBE-SEP-A
-A KUBE-SVC-WEB -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A
-A KUBE-SVC-WEB -j KUBE-SEP-B
-A KUBE-SVC-WEB -j KUBE-SEP-NEVER
-A KUBE-SVL-WEB -j KUBE-SEP-B
-A KUBE-SEP-A -s 10.1.0.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.1.0.2:8080
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.1.0.3:8080
-A KUBE-SEP-NEVER -p tcp -m tcp -j DNAT --to-destination 10.1.0.9:8080
COMMIT
`)
	addr, at := netip.MustParseAddr, netip.MustParseAddrPort
	for _, tt := range []struct {
		from, to string
		protocol v1.Protocol
		want     string
		path     string
	}{
		{"192.0.2.9", "10.96.0.10:80", v1.ProtocolTCP, "10.1.0.2:8080 10.1.0.3:8080", "KUBE-SERVICES > KUBE-SVC-WEB > KUBE-SEP-A"},
		{"192.0.2.9", "10.96.0.10:80", v1.ProtocolUDP, "", ""},
		{"192.0.2.9", "10.96.0.10:81", v1.ProtocolTCP, "", ""},
		{"192.0.2.9", "10.96.0.11:80", v1.ProtocolTCP, "", ""},
		{"192.0.2.9", "192.0.2.1:30080", v1.ProtocolTCP, "10.1.0.3:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-WEB > KUBE-SVL-WEB > KUBE-SEP-B"},
		{"192.0.2.9", "192.0.2.2:30080", v1.ProtocolTCP, "", ""},
		{"10.1.7.7", "192.0.2.1:30080", v1.ProtocolTCP, "10.1.0.2:8080 10.1.0.3:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-WEB > KUBE-SVC-WEB > KUBE-SEP-A"},
		{"192.0.2.1", "192.0.2.1:30080", v1.ProtocolTCP, "10.1.0.2:8080 10.1.0.3:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-WEB > KUBE-SVC-WEB > KUBE-SEP-A"},
		{"192.0.2.9", "203.0.113.1:80", v1.ProtocolTCP, "10.1.0.3:8080", "KUBE-SERVICES > KUBE-FW-WEB > KUBE-EXT-WEB > KUBE-SVL-WEB > KUBE-SEP-B"},
		{"198.51.100.9", "203.0.113.1:80", v1.ProtocolTCP, "", ""},
	} {
		w := natWalk{chains: chains, packet: ruleset.Packet{
			From: addr(tt.from), To: at(tt.to), Protocol: tt.protocol, NodeAddresses: []netip.Addr{addr("192.0.2.1")},
		}}
		w.chain("KUBE-SERVICES", 0)
		var got []string
		for _, a := range w.to {
			got = append(got, a.String())
		}
		slices.Sort(got)
		got = slices.Compact(got)
		if strings.Join(got, " ") != tt.want || strings.Join(w.path, " > ") != tt.path {
			t.Errorf("%+v: %v by %v", tt, got, w.path)
		}
	}
	// Rules that go in circles end.
	w := natWalk{chains: natChains("-A A -j B\n-A B -j A\n")}
	w.chain("A", 0)
}
