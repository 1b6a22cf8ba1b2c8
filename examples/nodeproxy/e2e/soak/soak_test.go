//go:build linux

package main

import (
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/testtime"
	"github.com/go-proxier/proxier/internal/vm"
)

// flags are the command's flags. TestSoakIPVS uses all, the other tests -nodeproxy alone.
var flags = newFlags(flag.CommandLine)

func TestMain(m *testing.M) { netlab.Main(m) }

// short builds the agent and returns the options of a run of some seconds.
func short(t *testing.T) *options {
	t.Helper()
	testtime.NeedThorough(t)
	netlab.Require(t)
	_, err := exec.LookPath("nft")
	netlab.Need(t, err == nil, "nft")
	o := newFlags(flag.NewFlagSet("", flag.PanicOnError))
	o.services, o.endpoints, o.rate, o.held, o.talks, o.pause, o.seed = 60, 6, 50, 20, 5, 0, 1
	o.apiserver = ""
	if o.nodeproxy = flags.nodeproxy; o.nodeproxy == "" {
		o.nodeproxy = filepath.Join(t.TempDir(), "nodeproxy")
		if err := buildAgent(t.Context(), o.nodeproxy, os.Environ()); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

// soak makes a run and logs the report.
func (o *options) soak(t *testing.T) *Report {
	t.Helper()
	dir := t.TempDir()
	log := t.Output()
	r, err := run(t.Context(), o, dir, log, log)
	if err != nil {
		t.Error(err)
	}
	if r == nil {
		t.FailNow()
	}
	r.table(log)
	if t.Failed() || !r.ok() {
		text, _ := os.ReadFile(filepath.Join(dir, "agent.log"))
		t.Logf("end of the agent's log:\n%s", text[max(0, len(text)-8000):])
	}
	return r
}

// TestNothingIsLostOrLeftOver runs a short soak in two modes at once.
func TestNothingIsLostOrLeftOver(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			o := short(t)
			_, err := exec.LookPath("ip6tables-restore")
			netlab.Need(t, err == nil, "iptables")
			o.mode, o.length = mode, 6*time.Second
			r := o.soak(t)
			if !r.ok() {
				t.Error("something was lost or left over")
			}
			if len(r.Events) < 2 || r.Connections["held"].Made == 0 || r.Connections["talk"].Made == 0 {
				t.Errorf("%d kinds of events and connections %v, want at least 2 kinds, and connections of kinds held and talk", len(r.Events), r.Connections)
			}
		})
	}
}

// TestLossesAndLeftoversAreFound flushes rules in an event that is not declared as an
// outage, and leaves a set behind.
func TestLossesAndLeftoversAreFound(t *testing.T) {
	t.Parallel()
	o := short(t)
	o.length, o.drain = time.Millisecond, 0
	o.events = []event{{name: "flush", weight: 1, begins: command("nft flush table ip TABLE; nft add table inet left; nft add set inet left mine {type ipv4_addr;}")}}
	r := o.soak(t)
	if r.Lost == 0 || !strings.HasPrefix(r.Failures[0].Event, "2 flush") {
		t.Errorf("%d failures %v, want failures in event 2 flush", r.Lost, r.Failures)
	}
	if !strings.Contains(strings.Join(r.Leftovers, "\n"), "nft: inet left set mine") {
		t.Errorf("leftovers %q, want set inet left mine", r.Leftovers)
	}
}

// TestSoakIPVS runs the command in mode ipvs, in a virtual machine if the kernel has no
// IPVS: go test -run TestSoakIPVS -v -timeout 1h . -for 30m -services 300
func TestSoakIPVS(t *testing.T) {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "for" })
	if !given {
		t.Skip("takes many minutes: runs if -for is given")
	}
	const agent = "testdata/nodeproxy"
	if os.Getenv("PROXIER_VM_INSIDE") == "" {
		// The machine gets the folder testdata. It lacks shared libraries.
		dir := t.TempDir()
		if err := buildAgent(t.Context(), filepath.Join(dir, agent), append(os.Environ(), "CGO_ENABLED=0")); err != nil {
			t.Fatal(err)
		}
		t.Chdir(dir)
	}
	if !vm.Inside(t, vm.IPVS, "") {
		return
	}
	flags.mode, flags.apiserver = "ipvs", ""
	var err error
	if flags.nodeproxy, err = filepath.Abs(agent); err != nil {
		t.Fatal(err)
	}
	if err := flags.check(); err != nil {
		t.Fatal(err)
	}
	if r := flags.soak(t); !r.ok() {
		t.Error("something was lost or left over")
	}
}

// TestPodsAnswerAtTheirOwnAddresses asks pods directly, over TCP and UDP.
func TestPodsAnswerAtTheirOwnAddresses(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	n, err := newNetwork()
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	pods := []int{0, localPods - 1, localPods, localPods + 1, localPods + nodePods - 1, localPods + farPods - 1}
	for i := 7; i < farPods; i += 501 {
		pods = append(pods, localPods+i)
	}
	from := n.places[0]
	for _, pod := range pods {
		for f := range families {
			for _, proto := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
				at := netip.AddrPortFrom(podAddr(pod, f), podPort)
				if o := from.probe(t.Context(), target{at, proto}, connectTimeout); o.kind != reached || o.server != at || o.source != from.addr[f] {
					t.Errorf("%s %s: %v, want reached with source %s", proto, at, o, from.addr[f])
				}
			}
		}
	}
}

func TestKernelObjectsAreCounted(t *testing.T) {
	listing := `table ip proxier {
	comment "x"

	map endpoints {
		type ipv4_addr : verdict
		elements = { 10.0.0.1 comment "a, b" : accept,
			     10.0.0.2 : accept, 10.0.0.3 : accept }
	}

	map sticky {
		type ipv4_addr : verdict
		flags timeout
		elements = { 10.0.0.1 : accept }
	}

	chain pool-3 {
		accept
	}

	chain services {
		type nat hook prerouting priority 0; policy accept;
	}
}
table ip nat {
	chain PREROUTING {
		type nat hook prerouting priority dstnat; policy accept;
	}
}
`
	k := kernelState{}
	k.addNFT(listing)
	got := k.objects()
	if len(got) != 3 || got["nft: ip proxier map endpoints"] != 3 || got["nft: ip proxier chain services"] != 1 {
		t.Errorf("objects %v, want 3 endpoints, 1 rule in services, and 3 objects in all", got)
	}
	other := kernelState{}
	other.addNFT(strings.Replace(listing, "10.0.0.2 : accept, ", "", 1))
	if d := k.differences(other); len(d) != 2 {
		t.Errorf("differences %q, want 2", d)
	}
	const address = ": kube-ipvs0    inet 10.96.1.0/32\n"
	if a, b := volatile.ReplaceAllString("8"+address, ""), volatile.ReplaceAllString("9"+address, ""); a != b {
		t.Errorf("an interface that was created again differs: %q, %q", a, b)
	}
	swapped := kernelState{}
	swapped.addNFT(strings.Replace(listing, "table ip proxier {", "table ip proxier-shadow {", 1))
	if d := k.differences(swapped); len(d) != 0 {
		t.Errorf("differences after the tables were swapped: %q", d)
	}
}

func TestDropsNamesCountersThatGrew(t *testing.T) {
	netstat := "TcpExt: SyncookiesSent ListenOverflows ListenDrops\nTcpExt: 7 %d 5\nIpExt: InNoRoutes ListenDrops\nIpExt: 1 9\n"
	tracking := "entries  clashres found insert_failed drop\n00000010 00000001 00000005 0000000a %08x\n00000010 00000000 00000005 00000002 00000001\n"
	read := func(overflows, dropped int) drops {
		d := drops{}
		d.add("n", fmt.Sprintf(netstat, overflows), fmt.Sprintf(tracking, dropped))
		return d
	}
	before := read(3, 0)
	if want := (drops{"n ListenOverflows": 3, "n ListenDrops": 5, "n clashres": 1, "n insert_failed": 12, "n drop": 1}); !maps.Equal(before, want) {
		t.Errorf("read %v, want %v", before, want)
	}
	if got := before.since(before); got != "nothing" {
		t.Errorf("without growth: %q", got)
	}
	if got, want := read(4, 31).since(before), "n ListenOverflows 1, n drop 31"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestLostPacketIsAcceptedWhileServiceHasNoEndpoints judges a connection that was established
// after a retransmission.
func TestLostPacketIsAcceptedWhileServiceHasNoEndpoints(t *testing.T) {
	o, err := newOracle()
	if err != nil {
		t.Fatal(err)
	}
	full := &service{id: 7, vip: 7, port: 80, endpoints: []endpoint{{pod: localPods}}}
	empty := &service{id: 7, vip: 7, port: 80}
	o.commit(nil, full)
	o.publish()
	o.inEffect()
	v := o.since()
	from := &place{name: "pod-1", in: "veth-pod1", addr: [2]netip.Addr{podAddr(0, 0), podAddr(0, 1)}}
	to := target{netip.AddrPortFrom(full.addr(clusterIPs, 0), 80), v1.ProtocolTCP}
	got := outcome{kind: reached, server: netip.AddrPortFrom(podAddr(localPods, 0), podPort), source: from.addr[0]}
	if err := o.judge(v, from, to, got); err != nil {
		t.Errorf("without a loss: %v", err)
	}
	got.lost = 1
	if o.judge(v, from, to, got) == nil {
		t.Error("a loss is accepted though the Service always had an endpoint")
	}
	o.commit(full, empty)
	o.publish()
	if err := o.judge(v, from, to, got); err != nil {
		t.Errorf("a loss while the endpoints change: %v", err)
	}
}

// TestModeIPVSIsAllowedWhatItDocuments checks which connections are held, and how long a request
// may go to a removed UDP endpoint.
func TestModeIPVSIsAllowedWhatItDocuments(t *testing.T) {
	o, err := newOracle()
	if err != nil {
		t.Fatal(err)
	}
	local := &service{id: 7, vip: 7, port: 80, kind: external, externalLocal: true, endpoints: []endpoint{{pod: 0}}}
	everywhere := &service{id: 8, vip: 8, port: 80, kind: external, endpoints: []endpoint{{pod: 0}}}
	o.commit(nil, local)
	o.commit(nil, everywhere)
	o.publish()
	o.inEffect()
	pod := &place{name: "pod-1", in: "veth-pod1", addr: [2]netip.Addr{podAddr(0, 0), podAddr(0, 1)}}
	client := &place{name: "client-1", in: "eth0", addr: [2]netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8:1::10")}}
	node := &place{name: "node", addr: [2]netip.Addr{nodeAddresses[0][0], nodeAddresses[1][0]}}
	for _, c := range []struct {
		from       *place
		to         netip.Addr
		ipvs, rest bool
	}{
		{pod, local.addr(externalIPs, 0), false, true},
		{client, local.addr(externalIPs, 0), true, true},
		{node, local.addr(externalIPs, 0), true, true},
		{pod, local.addr(clusterIPs, 0), true, true},
		{pod, everywhere.addr(externalIPs, 0), true, true},
		{pod, netip.MustParseAddr("10.96.200.1"), false, false}, // no Service
	} {
		v := o.since().Trace(c.from.packet(target{netip.AddrPortFrom(c.to, 80), v1.ProtocolTCP}))
		for mode, want := range map[string]bool{"ipvs": c.ipvs, "nftables": c.rest, "iptables": c.rest} {
			if got := (&soak{o: &options{mode: mode}}).lasts(c.from, v); got != want {
				t.Errorf("mode %s: a connection from %s to %s lasts: %t, want %t", mode, c.from.name, c.to, got, want)
			}
		}
	}
	// A removed UDP endpoint answers for up to two seconds in mode ipvs.
	span := func(mode string) time.Duration {
		return time.Duration((&options{mode: mode}).talkTries()) * talkPause
	}
	if span("ipvs") <= 2*time.Second || span("nftables") >= time.Second || span("iptables") >= time.Second {
		t.Errorf("attempts end after %v, %v and %v, want more than 2 s in mode ipvs and less than 1 s in the others", span("ipvs"), span("nftables"), span("iptables"))
	}
}
