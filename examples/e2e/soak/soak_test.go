//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/e2e/internal/nodeagent"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// flags are the command's flags. TestSoakIPVS uses all, the other tests -nodeproxy alone.
var flags = newFlags(flag.CommandLine)

func TestMain(m *testing.M) { netlab.Main(m) }

// short returns the options of a run of some seconds.
func short(t *testing.T, programs ...string) *options {
	t.Helper()
	testtime.NeedThorough(t)
	netlab.Require(t)
	netlab.NeedPrograms(t, programs...)
	o := newFlags(flag.NewFlagSet("", flag.PanicOnError))
	o.services, o.rate, o.pause, o.seed, o.nodeproxy = 60, 50, 0, 1, flags.nodeproxy
	return o
}

// soak makes a run and logs the result.
func (o *options) soak(t *testing.T) *recorder {
	t.Helper()
	dir := t.TempDir()
	o.logFile = filepath.Join(dir, "soak.log")
	r, err := run(t.Context(), o, dir, t.Output(), t.Output())
	if err != nil {
		t.Error(err)
	}
	if r == nil {
		t.FailNow()
	}
	r.table(t.Output())
	if t.Failed() || !r.ok() {
		text, _ := os.ReadFile(o.logFile + ".agent")
		t.Logf("end of the agent's log:\n%s", text[max(0, len(text)-8000):])
	}
	return r
}

// TestNothingIsLostOrLeftOver runs a short soak in two modes at the same time.
func TestNothingIsLostOrLeftOver(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			o := short(t, "nft", "ip6tables-restore")
			o.mode, o.length = mode, 6*time.Second
			r := o.soak(t)
			if !r.ok() {
				t.Error("something was lost or left over")
			}
			if r.number < 4 || r.counts["held"] == nil || r.counts["talk"] == nil {
				t.Errorf("%d events and connections %v, want some events, and connections of kinds held and talk", r.number, r.counts)
			}
		})
	}
}

// TestLossesAndLeftoversAreFound flushes rules in an event that is not declared as an
// outage, and leaves an address of a Service behind.
func TestLossesAndLeftoversAreFound(t *testing.T) {
	t.Parallel()
	o := short(t, "nft")
	o.length, o.drain = time.Millisecond, 0
	flush := tables("flush")
	left := shell("nft 'add table ip left; add set ip left mine {type ipv4_addr; elements = {198.18.0.7};}'")
	o.events = []event{{name: "flush", weight: 1, do: func(s *soak, ctx context.Context) error { return errors.Join(flush(s, ctx), left(s, ctx)) }}}
	r := o.soak(t)
	if len(r.failures) == 0 || !strings.Contains(r.failures[0], "into event 2 flush") {
		t.Errorf("failures %q, want some in event 2 flush", r.failures)
	}
	if !strings.Contains(strings.Join(r.left, "\n"), "198.18.0.7") {
		t.Errorf("leftovers %q, want 198.18.0.7", r.left)
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
		if err := nodeagent.Build(t.Context(), filepath.Join(dir, agent), "CGO_ENABLED=0"); err != nil {
			t.Fatal(err)
		}
		t.Chdir(dir)
	}
	if !vm.Inside(t, vm.IPVS, "") {
		return
	}
	flags.mode, flags.nodeproxy = "ipvs", agent
	if err := flags.check(); err != nil {
		t.Fatal(err)
	}
	if r := flags.soak(t); !r.ok() {
		t.Error("something was lost or left over")
	}
}

// TestLostPacketIsAcceptedWhileServiceHasNoEndpoints judges a connection that was established
// after a retransmission.
func TestLostPacketIsAcceptedWhileServiceHasNoEndpoints(t *testing.T) {
	o, err := newOracle()
	if err != nil {
		t.Fatal(err)
	}
	full := &service{id: 7, slot: 7, port: 80, endpoints: []endpoint{{pod: localPods}}}
	empty := &service{id: 7, slot: 7, port: 80}
	o.commit(change{nil, full})
	o.publish()
	o.inEffect()
	v := o.since()
	from := &place{name: "pod-1", in: "veth-pod1", addr: [2]netip.Addr{podAddr(0, 0), podAddr(0, 1)}}
	to := target{netip.AddrPortFrom(full.addr(clusterIPs, 0), 80), v1.ProtocolTCP}
	got := outcome{Outcome: netlab.Outcome{Kind: netlab.Reached, Server: netip.AddrPortFrom(podAddr(localPods, 0), podPort), Source: from.addr[0]}}
	if err := o.judge(v, from, to, got); err != nil {
		t.Errorf("without a loss: %v", err)
	}
	got.lost = 1
	if o.judge(v, from, to, got) == nil {
		t.Error("a loss is accepted though the Service always had an endpoint")
	}
	o.commit(change{full, empty})
	o.publish()
	if err := o.judge(v, from, to, got); err != nil {
		t.Errorf("a loss while the endpoints change: %v", err)
	}
}
