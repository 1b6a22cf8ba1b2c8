//go:build linux

package main

import (
	"maps"
	"strings"
	"testing"
)

const nftListing = `table ip proxier {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : classid
		elements = { 10.96.0.1 . tcp . 80 comment "a/x:p, q" : 8010:1,
			     10.96.0.2 . tcp . 80 comment "a/y:" : 8020:8001 }
	}

	map handlers {
		type classid : verdict
		elements = { 8010:0 : goto pool-1, 8020:0 : goto cluster-ip-sticky }
	}

	map sticky-pools {
		type classid : classid
		elements = { 0:8001 : 8001:3 }
	}

	map sticky-handlers {
		type classid : verdict
		elements = { 0:3 : goto sticky-1-9s }
	}

	map tcp-endpoints {
		type classid . mark : ipv4_addr . inet_service
		elements = { 0:1 . 0x00000000 : 10.1.1.2 . 8080 }
	}

	map sticky-buckets {
		type classid . mark : classid
		elements = { 8001:0 . 0x00000000 : 8001:1 }
	}

	map sticky-endpoints {
		type classid : ipv4_addr . inet_service
		elements = { 8001:1 comment "a/y:" : 10.1.1.3 . 8080 }
	}

	set cluster-ips {
		type ipv4_addr
		elements = { 10.96.0.1 }
	}

	chain services {
		ip daddr . meta l4proto . th dport vmap @handlers
		jump masquerading
	}

	chain masquerading {
		masquerade
	}

	chain pool-1 {
		dnat to x
	}

	chain sticky-1-9s {
		dnat to y
	}

	chain cluster-ip-sticky {
		vmap @sticky-handlers
	}

	chain unused {
		drop
	}
}
`

func nftMeaningOf(text string) meaning {
	m := meaning{}
	parseNFT(text).addTo(m, "ip")
	return m
}

// TestNumbersOfTablesHaveNoMeaning changes numbers and order, which must not differ, and then
// facts, which must.
func TestNumbersOfTablesHaveNoMeaning(t *testing.T) {
	want := nftMeaningOf(nftListing)
	if got := want["ip service-ips: 10.96.0.2 . tcp . 80 by handlers"]; got != `"a/y:": cluster-ip-sticky sticky-1-9s 10.1.1.3 . 8080` {
		t.Errorf("affinity: %q", got)
	}
	if len(want) != 8 {
		t.Errorf("facts: %q, want 2 frontends, 1 cluster IP and 5 chains", maps.Collect(maps.All(want)))
	}
	same := strings.NewReplacer("8010:1", "8030:7", "8010:0", "8030:0", "0:1 . ", "0:7 . ", "8001:1", "8001:4", "8001:3", "8001:9", "{ 0:3", "{ 0:9", "\tchain unused {\n\t\tdrop\n\t}\n", "").Replace(nftListing)
	if d := nftMeaningOf(same).differences(want); len(d) != 0 {
		t.Errorf("other numbers make differences: %q", d)
	}
	for _, edit := range [][2]string{
		{"10.1.1.2", "10.1.1.9"}, {"10.1.1.3", "10.1.1.9"}, {"8001:1 comment", "8001:2 comment"}, {"goto pool-1", "goto pool-2"},
		{"a/x:p", "a/z:p"}, {"{ 10.96.0.1 }", "{ 10.96.0.1, 10.96.0.2 }"}, {"\t\tmasquerade\n", ""}, {"dnat to x", "dnat to z"}, {"goto sticky-1-9s", "goto sticky-1-8s"}, {"0:8001 :", "0:8002 :"}, {"10.96.0.2 . tcp", "10.96.0.2 . udp"},
	} {
		if d := nftMeaningOf(strings.Replace(nftListing, edit[0], edit[1], 1)).differences(want); len(d) == 0 {
			t.Errorf("%q instead of %q makes no difference", edit[1], edit[0])
		}
	}
}

func TestChainsThatNoRuleLeadsToAreUnused(t *testing.T) {
	tables := parseSave(`*nat
:PREROUTING ACCEPT [1:2]
:KUBE-A - [0:0]
:KUBE-B - [0:0]
:KUBE-C - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A PREROUTING -j KUBE-A
-A KUBE-A -s 10.0.0.0/8 -g KUBE-B
-A KUBE-C -j KUBE-A
-A KUBE-PROXY-CANARY -m comment --comment 77
COMMIT
`)
	got := reachable(builtIn, tables["nat"])
	for chain, want := range map[string]bool{"KUBE-A": true, "KUBE-B": true, "KUBE-C": false} {
		if got[chain] != want {
			t.Errorf("%s is reachable: %t, want %t", chain, got[chain], want)
		}
	}
	if _, ok := tables["nat"]["KUBE-PROXY-CANARY"]; ok {
		t.Error("the canary counts")
	}
	m := meaning{"a": "1", unused + "b": "2"}
	if d := m.withoutUnused().differences(meaning{"a": "1"}); len(d) != 0 {
		t.Errorf("unused chains count: %q", d)
	}
}

func TestMarksOfServersHaveNoMeaning(t *testing.T) {
	read := func(servers, sets string) meaning {
		m := meaning{}
		m.addServers(servers, sets)
		return m
	}
	const servers = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn
TCP  10.96.0.1:80 rr
  -> 10.1.1.2:8080                Masq    1      0          0
FWM  12289 rr
  -> 10.1.1.3:8080                Masq    1      0          3
FWM  12289 IPv6 rr
  -> [fd00::3]:8080               Masq    1      0          0
`
	const sets = `create KUBE-SHORT hash:ip,port family inet hashsize 1024 maxelem 65536 skbinfo
add KUBE-SHORT 203.0.113.1,tcp:80 skbmark 0x3001
add KUBE-6-SHORT 2001:db8::1,tcp:80 skbmark 0x3001
add KUBE-CLUSTER-IP 10.96.0.1,tcp:80
`
	want := read(servers, sets)
	if len(want) != 5 {
		t.Errorf("facts: %q, want 1 server, 1 set and 3 elements", want)
	}
	other := strings.NewReplacer("12289 rr", "12300 rr", "Masq    1      0          3", "Masq    1      7          0", "203.0.113.1,tcp:80 skbmark 0x3001", "203.0.113.1,tcp:80 skbmark 0x300c", "1024", "2048")
	if d := read(other.Replace(servers), other.Replace(sets)).differences(want); len(d) != 0 {
		t.Errorf("another mark makes differences: %q", d)
	}
	for _, edit := range [][2]string{{"10.1.1.3", "10.1.1.4"}, {"[fd00::3]", "[fd00::4]"}, {"12289 rr", "12290 rr"}, {"TCP  10.96.0.1:80", "TCP  10.96.0.2:80"}, {"TCP ", "UDP "}, {"80 rr", "80 rr persistent 60"}, {"Masq    1 ", "Masq    0 "}, {"Masq    1      0          3", "Route   1      0          3"}} {
		if d := read(strings.Replace(servers, edit[0], edit[1], 1), sets).differences(want); len(d) == 0 {
			t.Errorf("%q instead of %q makes no difference", edit[1], edit[0])
		}
	}
}

// TestServersKeptByConnectionsMayBeThere has a virtual server of a deleted Service, whose real servers all
// drain, beside one that serves.
func TestServersKeptByConnectionsMayBeThere(t *testing.T) {
	read := func(servers, sets string) meaning {
		m := meaning{}
		kept := m.addServers(servers, sets)
		m.keep("address 10.96.0.10/32", kept["10.96.0.10"])
		return m
	}
	const (
		servers = "TCP 10.96.0.1:80 rr\n-> 10.1.1.2:8080 Masq 1 0 0\n"
		sets    = "add KUBE-CLUSTER-IP 10.96.0.1,tcp:80\n"
		drain   = "TCP 10.96.0.10:80 rr\n-> 10.1.1.3:8080 Masq 0 1 0\n"
		ended   = "TCP 10.96.0.10:80 rr\n-> 10.1.1.3:8080 Masq 0 0 0\n"
		of      = "add KUBE-CLUSTER-IP 10.96.0.10,tcp:80\n"
		// At NodePorts the sets have no address.
		ofNode = "add KUBE-NODE-PORT-LOCAL-TCP 80\n"
	)
	want := read(servers, sets)
	delete(want, "address 10.96.0.10/32")
	if d := read(servers+drain, sets+of).differences(want); len(d) != 0 {
		t.Errorf("a server with connections counts: %q", d)
	}
	if d := read(servers+drain, sets+of+ofNode).differences(want); len(d) != 0 {
		t.Errorf("a NodePort with connections counts: %q", d)
	}
	if d := read(servers, sets).differences(want); len(d) != 1 {
		t.Errorf("an address without a server: %q", d)
	}
	for _, got := range []meaning{
		read(servers+ended, sets+of),                                 // without a connection
		read(servers, sets+of),                                       // an element without its server
		read(servers, sets+ofNode),                                   // the same for a NodePort
		read(servers+drain, sets+of+"add KUBE-6-NODE-PORT-TCP 80\n"), // of the other family
		read(drain, sets+of),                                         // without the server that serves
		read(servers+drain, sets+of+"x y\n"),                         // with something else
	} {
		delete(got, "address 10.96.0.10/32")
		if d := got.differences(want); len(d) == 0 {
			t.Errorf("no difference: %q", got)
		}
	}
	served := read(servers+strings.Replace(drain, "Masq 0", "Masq 1", 1), sets+of)
	if d := read(servers+drain, sets+of).differences(served); len(d) != 1 {
		t.Errorf("differences from a Service that is served: %q, want its real servers", d)
	}
}

// TestServersThatDrainWithConnectionsDoNotCount reads real servers of weight 0, with connections and
// without.
func TestServersThatDrainWithConnectionsDoNotCount(t *testing.T) {
	got, draining := parseServers(`IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn
TCP  10.96.0.1:80 rr
  -> 10.1.1.2:8080                Masq    0      1          0
  -> 10.1.1.3:8080                Masq    0      0          0
  -> 10.1.1.4:8080                Masq    1      0          2
FWM  12289 IPv6 rr persistent 60
  -> [fd00::3]:8080               Masq    0      0          1
  -> [fd00::4]:8080               Masq    0      0          0
`)
	for name, want := range map[string]string{
		"tcp 10.96.0.1:80": "rr, 10.1.1.3:8080 Masq 0, 10.1.1.4:8080 Masq 1",
		"fwm 12289 IPv6":   "rr persistent 60, [fd00::4]:8080 Masq 0",
	} {
		if got[name] != want {
			t.Errorf("%s: %s, want %s", name, got[name], want)
		}
	}
	if len(got) != 2 || len(draining) != 0 {
		t.Errorf("servers %q, of which %v drain; want two that serve", got, draining)
	}
}

// TestServersOfDeletedServicesMayDrain reads a virtual server whose mark no set sets any more.
func TestServersOfDeletedServicesMayDrain(t *testing.T) {
	const server = "FWM 12289 rr\n"
	for _, c := range []struct {
		what, servers string
		want          int
	}{
		{"its connections end", server + "-> 10.1.1.3:8080 Masq 0 1 0\n", 0},
		{"it has no connection", server + "-> 10.1.1.3:8080 Masq 0 0 0\n", 1},
		{"it has another real server", server + "-> 10.1.1.3:8080 Masq 0 1 0\n-> 10.1.1.4:8080 Masq 1 0 0\n", 1},
		{"it has no real server", server, 1},
	} {
		m := meaning{}
		if m.addServers(c.servers, ""); len(m) != c.want {
			t.Errorf("%s: facts %q, want %d", c.what, m, c.want)
		}
	}
}
