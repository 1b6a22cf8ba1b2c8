package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// kubeProxyRules is rules as kube-proxy writes them, with a few of a tree of NodePorts.
const kubeProxyRules = `*nat
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
-A KUBE-NODEPORTS -p udp -j KUBE-EXT-NP-UDP
-A KUBE-EXT-NP-UDP -p udp -m udp --dport 16384:32767 -g KUBE-EXT-NP-UDP-4000/2
-A KUBE-EXT-NP-UDP -j KUBE-SEP-NEVER
-A KUBE-EXT-NP-UDP-4000/2 -p udp -m comment --comment "ns/dns" -m udp --dport 30053 -j KUBE-SEP-DNS
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
-A KUBE-SEP-DNS -p udp -m udp -j DNAT --to-destination 10.1.0.4:53
-A KUBE-SEP-NEVER -j DNAT --to-destination 10.1.0.9:8080
COMMIT
`

func TestPacketIsFollowedThroughSavedRules(t *testing.T) {
	t.Parallel()
	chains := parseRules(kubeProxyRules)
	addr, at := netip.MustParseAddr, netip.MustParseAddrPort
	for _, tt := range []struct {
		from, to  string
		protocol  v1.Protocol
		endpoints string
		where     string
		service   string
	}{
		{"192.0.2.9", "10.96.0.10:80", v1.ProtocolTCP, "10.1.0.2:8080 10.1.0.3:8080", "KUBE-SERVICES > KUBE-SVC-WEB > KUBE-SEP-A", "ns/web:http"},
		{"192.0.2.9", "10.96.0.10:80", v1.ProtocolUDP, "", "", ""},
		{"192.0.2.9", "10.96.0.10:81", v1.ProtocolTCP, "", "", ""},
		{"192.0.2.9", "10.96.0.11:80", v1.ProtocolTCP, "", "", ""},
		{"192.0.2.9", "192.0.2.1:30080", v1.ProtocolTCP, "10.1.0.3:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-WEB > KUBE-SVL-WEB > KUBE-SEP-B", ""},
		{"192.0.2.9", "192.0.2.2:30080", v1.ProtocolTCP, "", "", ""},
		{"192.0.2.9", "192.0.2.1:30053", v1.ProtocolUDP, "10.1.0.4:53", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-NP-UDP > KUBE-EXT-NP-UDP-4000/2 > KUBE-SEP-DNS", "ns/dns"},
		{"192.0.2.9", "192.0.2.1:30054", v1.ProtocolUDP, "", "", ""},
		{"192.0.2.9", "192.0.2.1:53", v1.ProtocolUDP, "10.1.0.9:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-NP-UDP > KUBE-SEP-NEVER", ""},
		{"10.1.7.7", "192.0.2.1:30080", v1.ProtocolTCP, "10.1.0.2:8080 10.1.0.3:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-WEB > KUBE-SVC-WEB > KUBE-SEP-A", ""},
		{"192.0.2.1", "192.0.2.1:30080", v1.ProtocolTCP, "10.1.0.2:8080 10.1.0.3:8080", "KUBE-SERVICES > KUBE-NODEPORTS > KUBE-EXT-WEB > KUBE-SVC-WEB > KUBE-SEP-A", ""},
		{"192.0.2.9", "203.0.113.1:80", v1.ProtocolTCP, "10.1.0.3:8080", "KUBE-SERVICES > KUBE-FW-WEB > KUBE-EXT-WEB > KUBE-SVL-WEB > KUBE-SEP-B", ""},
		{"198.51.100.9", "203.0.113.1:80", v1.ProtocolTCP, "", "", ""},
	} {
		want := dataplane.Found{Service: tt.service}
		if tt.endpoints != "" {
			want.Entry, want.Where = true, "chain "+tt.where
		}
		for _, a := range strings.Fields(tt.endpoints) {
			want.Endpoints = append(want.Endpoints, at(a))
		}
		got := follow(chains, ruleset.Packet{From: addr(tt.from), To: at(tt.to), Protocol: tt.protocol, NodeAddresses: []netip.Addr{addr("192.0.2.1")}})
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s to %s %s: %+v, want %+v", tt.from, tt.protocol, tt.to, got, want)
		}
	}
}

func TestFollowEndsInLoops(t *testing.T) {
	t.Parallel()
	got := follow(parseRules("-A KUBE-SERVICES -j B\n-A B -j KUBE-SERVICES\n"), ruleset.Packet{})
	if got.Entry {
		t.Errorf("found %+v", got)
	}
}

// TestLookupFindsEveryKindOfFrontend looks up frontends among so many others that they are in
// trees of chains.
func TestLookupFindsEveryKindOfFrontend(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor)
		var queries []dataplane.Query // of all packets
		look := func(from, to string) (dataplane.Found, error) {
			p := ruleset.Packet{To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP, InInterface: "eth0", NodeAddresses: r.tracker.Node().Addresses}
			p.From = netip.MustParseAddr(from)
			queries = append(queries, dataplane.Query{Packet: p})
			found, err := r.lookup(dataplane.Query{Packet: p})
			if err != nil {
				return dataplane.Found{}, err
			}
			return found[0], nil
		}
		if _, err := look("192.0.2.9", "10.96.0.0:80"); !errors.Is(err, dataplane.ErrNoRules) {
			t.Errorf("before the first sync: %v, want ErrNoRules", err)
		}
		r.everyKind()
		for i := range firstRules {
			r.set(100+i, []int{100 + i}, nodePort(31000+int32(i)))
		}
		r.sync()
		queries = nil
		var one []dataplane.Found
		for _, tt := range []struct{ from, to, service, endpoints string }{
			{"192.0.2.9", "10.96.0.0:80", "ns/svc-0:p", "[10.244.0.1:8080 10.244.0.2:8080]"},
			{"fd00:2::9", "[fd00:10:96::1]:80", "ns/svc-0:p", "[[fd00:10:244::2]:8080 [fd00:10:244::3]:8080]"},
			{"192.0.2.9", "10.96.0.0:81", "", "[]"},
			{"172.16.0.9", "203.0.113.1:80", "ns/svc-1:p", "[10.244.0.3:8080 10.244.0.4:8080]"},
			{"192.0.2.9", "203.0.113.1:80", "", "[]"}, // not an allowed source
			{"192.0.2.9", "198.51.100.1:80", "ns/svc-2:p", "[10.244.0.6:8080]"},
			{"10.244.0.9", "198.51.100.1:80", "ns/svc-2:p", "[10.244.0.6:8080 10.244.0.7:8080]"},
			{"192.0.2.9", "192.168.7.1:30081", "ns/svc-2:p", "[10.244.0.6:8080]"},
			{"192.0.2.9", "10.96.0.3:80", "ns/svc-3:p", "[10.244.0.8:8080 10.244.0.9:8080]"}, // affinity
			{"192.0.2.9", "10.96.0.150:80", "ns/svc-150:p", "[10.244.0.150:8080]"},
			{"192.0.2.9", "192.168.7.1:31050", "ns/svc-150:p", "[10.244.0.150:8080]"},
			{"192.0.2.9", "192.168.7.2:31050", "", "[]"}, // another host
		} {
			got := must.Get(look(tt.from, tt.to))(t)
			if got.Entry != (tt.service != "") || got.Service != tt.service || fmt.Sprint(got.Endpoints) != tt.endpoints || got.Entry != strings.HasPrefix(got.Where, "chain KUBE-SERVICES > ") {
				t.Errorf("%s to %s: %+v, want %s of %s", tt.from, tt.to, got, tt.endpoints, tt.service)
			}
			one = append(one, got)
		}
		if all, err := r.lookup(queries...); err != nil || !reflect.DeepEqual(all, one) {
			t.Errorf("all packets at once: %v\n%+v\nwant what they have one by one\n%+v", err, all, one)
		}
	})
}
