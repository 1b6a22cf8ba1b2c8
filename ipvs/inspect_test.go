//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// testLookupFindsVirtualServers compares Lookup with a delta, and with later changes by
// ipvsadm(8) and ip(8).
func testLookupFindsVirtualServers(t *testing.T) {
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	look := func(to string, internal bool) (dataplane.Found, error) {
		t.Helper()
		return Lookup(t.Context(), Config{NetNS: r.host().File()}, dataplane.Query{
			Packet:   ruleset.Packet{To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP},
			Internal: internal, NodePort: strings.HasSuffix(to, ":30001"),
		})
	}
	if _, err := look("10.96.0.1:80", false); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("before the first delta: %v, want ErrNoRules", err)
	}
	r.set(svc(1, nodePort(30001), externalLocal), 1, 1, -1)
	r.sync()
	finds := func(to string, internal bool, where string, endpoints ...string) {
		t.Helper()
		want := dataplane.Found{Entry: where != "", Where: where}
		for _, e := range endpoints {
			want.Endpoints = append(want.Endpoints, netip.MustParseAddrPort(e))
		}
		got, err := look(to, internal)
		if err != nil || got.Entry != want.Entry || got.Where != want.Where || got.Service != "" || !slices.Equal(got.Endpoints, want.Endpoints) {
			t.Errorf("%s, internal %v: %+v, error %v, want %+v", to, internal, got, err, want)
		}
	}
	const local, remote = "10.244.1.1:8080", "10.245.0.1:8080"
	finds("10.96.0.1:80", false, "virtual server TCP 10.96.0.1:80, scheduler rr", local, remote)
	finds("10.96.0.1:80", true, "virtual server TCP 10.96.0.1:80, scheduler rr", local, remote)
	finds("192.0.2.1:30001", false, "virtual server TCP 192.0.2.1:30001, scheduler rr", local)
	finds("192.0.2.1:30001", true, "virtual server FWM 12289 IPv4, for internal traffic to TCP 192.0.2.1:30001, scheduler rr", local, remote)
	finds("10.96.0.1:81", false, "")
	finds("192.0.2.1:30002", true, "")
	finds("[fd00:96::2]:80", true, "")

	r.run("ipvsadm -e -t 10.96.0.1:80 -r " + remote + " -m -w 0")
	finds("10.96.0.1:80", false, "virtual server TCP 10.96.0.1:80, scheduler rr", local)
	r.run("ip addr del 10.96.0.1/32 dev " + deviceName)
	var drift *dataplane.DriftError
	if _, err := look("10.96.0.1:80", false); !errors.As(err, &drift) || !strings.Contains(drift.What, "10.96.0.1 is bound to no device") {
		t.Errorf("without the address: %v, want a DriftError", err)
	}
	r.run("ipset flush KUBE-SHORT-CIRCUIT")
	finds("192.0.2.1:30001", true, "virtual server TCP 192.0.2.1:30001, scheduler rr", local)

	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	q := dataplane.Query{Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: v1.ProtocolTCP}}
	if _, err := Lookup(canceled, Config{NetNS: r.host().File()}, q); !errors.Is(err, context.Canceled) {
		t.Errorf("with a canceled context: %v", err)
	}
}

// testOnlyBackendRulesAreOwned calls Owned with kube-proxy's chains and with the backend's.
func testOnlyBackendRulesAreOwned(t *testing.T) {
	netlab.NeedPrograms(t, "iptables-nft-restore", "iptables-nft-save", "ip6tables-nft-save")
	h := netlab.NewHost(t)
	c := Config{NetNS: h.File(), IPTables: iptables.NFT}
	owned := func(what string, want bool) {
		t.Helper()
		if got, err := Owned(t.Context(), c); err != nil || got != want {
			t.Errorf("%s: %v, error %v", what, got, err)
		}
	}
	restore := func(input string) {
		t.Helper()
		cmd := netlab.Command(t, "iptables-nft-restore", "--noflush")
		cmd.Stdin = strings.NewReader(input)
		must.Do(t, h.Start(cmd))
		must.Do(t, cmd.Wait())
	}
	owned("empty tables", false)
	restore("*nat\n:KUBE-SERVICES -\n:KUBE-LOAD-BALANCER -\n:KUBE-NODE-PORT -\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n")
	owned("kube-proxy's", false)
	// The names of the backend's chains are enough.
	input, n := "", 0
	for _, table := range (rules{family: tracker.IPv4, mark: uint32(dataplane.DefaultMasqueradeMark), node: &ruleset.Node{}}).tables() {
		input += "*" + table.name + "\n"
		for _, chain := range table.chains {
			input += ":" + chain.name + " -\n"
			n++
		}
		input += "COMMIT\n"
	}
	if n < 10 {
		t.Fatalf("only %d chains", n)
	}
	restore(input)
	owned("a Backend's", true)
}

// testConnectionsAreCounted compares the counters with the number of connections, during changes
// of endpoints and after a restart.
func testConnectionsAreCounted(t *testing.T) {
	h := newHost(t)
	c := Config{Families: []tracker.Family{tracker.IPv4}}
	r := newRig(t, h, c)
	c.NetNS = h.File()
	if _, err := Traffic(t.Context(), c); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("before the first delta: %v, want ErrNoRules", err)
	}
	for _, a := range []string{"10.244.1.1/32", "10.244.1.2/32"} {
		must.Do(t, h.AddAddr("eth0", netip.MustParsePrefix(a)))
		h.ServeTCP(t, strings.TrimSuffix(a, "/32")+":8080", func(c net.Conn) { fmt.Fprintln(c, "hello") })
	}
	key := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: svcName(1), Port: "http", Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
	at := dataplane.Destination{Addr: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: v1.ProtocolTCP}
	opened := uint64(0)
	for i, step := range []func(){
		func() { r.set(svc(1), 1, 1) },
		func() { r.set(svc(1), 1, 1, 2) },
		func() { r.set(svc(1, sticky), 1, 2) },
		r.restart,
		func() { r.cursor.Resync() },
	} {
		step()
		r.sync()
		for range 5 {
			// A port of its own: whether IPVS counts a second connection from a port depends on
			// whether it remembers the first.
			opened++
			conn := must.Get(h.Dial(t.Context(), "tcp", fmt.Sprintf("192.0.2.1:%d", 20000+opened), "10.96.0.1:80"))(t)
			conn.Close()
		}
		var got *dataplane.Traffic
		var n dataplane.Counters
		for deadline := time.Now().Add(testtime.Timeout); ; time.Sleep(200 * time.Millisecond) { // the kernel sums up every two seconds
			var err error
			if got, err = r.backend.Traffic(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n = got.Services[key]; n.Connections >= opened && n.Packets >= 3*opened || time.Now().After(deadline) {
				break
			}
		}
		if got.Known != counted || n.Connections != opened || n.Packets < 3*opened || n.Bytes < 40*n.Packets || len(got.Services) != 1 {
			t.Errorf("step %d: %+v after %d connections", i, got, opened)
		}
		read, err := Traffic(t.Context(), c)
		if err != nil || read.Unnamed[at].Connections != opened || len(read.Unnamed) != 1 || len(read.Services) != 0 {
			t.Errorf("step %d: without the backend %+v, error %v", i, read, err)
		}
	}
}

// testEveryVirtualServerHasCounters compares the two ways in which virtual servers are listed, with
// packet marks and in both families.
func testEveryVirtualServerHasCounters(t *testing.T) {
	r := newRig(t, newHost(t), Config{})
	r.set(svc(1, nodePort(30001), externalLocal), 1, 1, -1)
	r.set(svc(2, over(v1.ProtocolSCTP), nodePort(30002)), 2, 1, -1)
	r.tracker.SetSlice(backendtest.Slice(svcName(1), "2", tracker.IPv6, "http", v1.ProtocolTCP,
		backendtest.Endpoint("fd00:244::1", "node"), backendtest.Endpoint("fd00:245::1", "other")))
	r.sync()
	k := r.backend.kernel
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		stats := must.Get(k.statistics(f))(t)
		marked := 0
		if err := k.virtuals(f, func(key virtualKey, _ virtual) {
			if _, ok := stats[key]; !ok {
				t.Errorf("no counters of %v", key)
			}
			if key.mark != 0 {
				marked++
			}
			delete(stats, key)
		}); err != nil || marked == 0 || len(stats) != 0 {
			t.Errorf("%v: %d marks, counters of others %v, error %v", f, marked, stats, err)
		}
	}
}
