//go:build linux

package ipvs

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// testEndpointsAreChosenEvenly counts connections by endpoint. The default scheduler must
// choose endpoints in turn, and Maglev's hash of the client's port uniformly.
func testEndpointsAreChosenEvenly(f *faultWorld) {
	t := f.t
	setPods(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
	udp := f.targets[2]
	count := func(n int) map[netip.AddrPort]int {
		out := map[netip.AddrPort]int{}
		for range n {
			server := must.Get(f.Reach(udp, testtime.Timeout))(t)
			out[server]++
		}
		return out
	}
	rounds := 5
	if got := count(rounds * len(f.pods)); len(got) != len(f.pods) {
		t.Errorf("%v", got)
	} else {
		for server, n := range got {
			if n != rounds {
				t.Errorf("%s was chosen %d times in %d rounds: %v", server, n, rounds, got)
			}
		}
	}
	b := must.Get(New(t.Context(), Config{NetNS: f.Env.NetNS, Families: f.Env.Families, Scheduler: Maglev}))(t)
	defer b.Close()
	c := f.Engine.Attach("maglev", b)
	defer c.Detach()
	must.Do(t, c.Sync(t.Context()))
	// This is Pearson's test. The table of mh is uniform to a hundredth, and the kernel's
	// hash has another key in each run. The critical values are for one false alarm in
	// 10^9, by degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods,
	// 1.3.6.7.4, has the formula).
	critical := map[int]float64{3: 44.84, 4: 47.88, 5: 50.69, 6: 53.34}
	const each = 25
	n := each * len(f.pods)
	got, chi := count(n), 0.0
	for _, p := range f.pods {
		d := float64(got[netip.MustParseAddrPort(p)] - each)
		chi += d * d / each
	}
	limit, ok := critical[len(f.pods)-1]
	if !ok {
		t.Fatalf("no critical value for %d pods", len(f.pods))
	}
	t.Logf("chi-squared %.1f over %d pods, at most %.1f allowed: %v", chi, len(f.pods), limit, got)
	if chi > limit {
		t.Errorf("chi-squared is %.1f, more than %.1f: %v", chi, limit, got)
	}
}

// testAffinityLasts connects several times within the timeout. The default scheduler sends
// a client without affinity to the next endpoint.
func testAffinityLasts(f *faultWorld) {
	t := f.t
	const timeout = 5 * time.Second
	s := svc(60, affinity(int32(timeout/time.Second)))
	f.Tracker.SetService(s)
	f.Tracker.SetSlice(podSlice(60, v1.ProtocolTCP, f.pods, len(f.pods), f.rng))
	f.Sync()
	to := conformance.Target{Addr: netip.MustParseAddrPort("10.96.0.60:80"), Protocol: v1.ProtocolTCP}
	last := time.Now()
	server := must.Get(f.Reach(to, testtime.Timeout))(t)
	kept := 0
	for _, pause := range []time.Duration{0, timeout / 2, timeout * 4 / 5, timeout / 2} {
		time.Sleep(pause)
		// Changes of another Service must not affect the client.
		f.Tracker.SetSlice(podSlice(50, v1.ProtocolTCP, f.pods, 1, f.rng))
		f.Sync()
		start := time.Now()
		next := must.Get(f.Reach(to, testtime.Timeout))(t)
		// If the machine was too slow for the timeout, the client may move.
		if after := time.Since(last); after < timeout {
			kept++
			if next != server {
				t.Errorf("after %v the client of %s was sent to %s", after.Round(time.Millisecond), server, next)
			}
		}
		last, server = start, next
	}
	t.Logf("the client returned within the timeout %d times of 4", kept)
}

// hashFlows is the number of flows that a test sends.
const hashFlows = 1000

// flows sends a datagram to the Service from each of many ports. It returns the endpoint of
// each port.
func (r *rig) flows(i int) map[uint16]netip.AddrPort {
	r.tb.Helper()
	vip := netip.MustParseAddr(clusterIP(i)).As4()
	err := r.host().Do(func() error {
		for port := range hashFlows {
			s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = unix.Bind(s, &unix.SockaddrInet4{Addr: [4]byte{192, 0, 2, 1}, Port: 20000 + port})
			if err == nil {
				// No host has the endpoints' addresses, so no answer comes. IPVS lists the flow.
				_ = unix.Sendto(s, []byte("x"), 0, &unix.SockaddrInet4{Addr: vip, Port: 80})
			}
			unix.Close(s)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		r.tb.Fatal(err)
	}
	out := map[uint16]netip.AddrPort{}
	r.connections("cat /proc/net/ip_vs_conn", func(list []string) error {
		for _, l := range list {
			f := strings.Fields(l)
			if f[0] != "UDP" || f[3] != fmt.Sprintf("%X", vip) {
				continue
			}
			port, err1 := strconv.ParseUint(f[2], 16, 16)
			ip, err2 := hex.DecodeString(f[5])
			to, err3 := strconv.ParseUint(f[6], 16, 16)
			if err1 != nil || err2 != nil || err3 != nil || len(ip) != 4 {
				r.tb.Fatalf("connection %q: %v %v %v", l, err1, err2, err3)
			}
			out[uint16(port)] = netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip)), uint16(to))
		}
		if len(out) < hashFlows {
			return fmt.Errorf("IPVS lists %d flows of %d", len(out), hashFlows)
		}
		return nil
	})
	return out
}

// differing returns the percentage of flows that two nodes send to different endpoints.
func differing(a, b map[uint16]netip.AddrPort) float64 {
	n := 0
	for port, to := range a {
		if b[port] != to {
			n++
		}
	}
	return 100 * float64(n) / float64(len(a))
}

// testNodesHashAlike compares the endpoints of flows on nodes that have the same endpoints after
// different changes. The kernel's table depends neither on the node nor on the Service's
// address, so many Services on one node stand for many nodes.
func testNodesHashAlike(t *testing.T) {
	r := newRig(t, newHost(t), Config{Scheduler: Maglev, Families: []tracker.Family{tracker.IPv4}})
	r.run("ip route add 10.0.0.0/8 via 192.0.2.2")
	services := 0
	drain := func() {
		t.Helper()
		must.Do(t, r.backend.tend(context.Background(), time.Now().Add(time.Hour)))
	}
	node := func(history ...[]int) map[uint16]netip.AddrPort {
		t.Helper()
		services++
		for _, eps := range history {
			drain()
			r.set(svc(services, over(v1.ProtocolUDP)), services, eps...)
			r.sync()
		}
		return r.flows(services)
	}
	for _, n := range []int{3, 10, 40} {
		all := make([]int, n)
		for i := range all {
			all[i] = -(i + 1)
		}
		reversed := slices.Clone(all)
		slices.Reverse(reversed)
		cold := node(all)
		if d := differing(cold, node(reversed)); d != 0 {
			t.Errorf("two nodes that started with the same %d endpoints send %.1f of 100 flows to different ones", n, d)
		}
		// Earlier changes give servers another place in the kernel's list, which affects the
		// table.
		for _, h := range []struct {
			name    string
			history [][]int
		}{
			{"one was away", [][]int{all, all[1:], all}},
			{"scaled up from one", [][]int{all[n-1:], all[n/2:], all}},
			{"restarted one by one, the last one first", rolling(reversed)},
		} {
			d := differing(cold, node(h.history...))
			t.Logf("%d endpoints, %s: %.1f of 100 flows go to another endpoint than on a node that just started", n, h.name, d)
			if d > 5 {
				t.Errorf("%d endpoints, %s: %.1f of 100 flows moved, want at most 5", n, h.name, d)
			}
		}
		// The first endpoint goes. Its flows move immediately, and no others. When it has drained,
		// the kernel rebuilds the table, and some flows move.
		first := netip.MustParseAddrPort("10.245.0.1:8080")
		during := node(all, all[1:])
		services++
		r.set(svc(services, over(v1.ProtocolUDP)), services, all...)
		r.sync()
		r.set(svc(services, over(v1.ProtocolUDP)), services, all[1:]...)
		r.sync()
		drain()
		after := r.flows(services)
		var its, again, others int
		for port, to := range cold {
			switch {
			case during[port] == first || after[port] == first:
				t.Errorf("the flow from port %d is sent to the removed endpoint %s", port, first)
			case to == first:
				its++
				if during[port] != after[port] {
					again++
				}
			case to != during[port]:
				t.Errorf("the flow from port %d moved from %s to %s, although only another endpoint drains", port, to, during[port])
			case to != after[port]:
				others++
			}
		}
		t.Logf("%d endpoints, one goes: when it has drained, %d of its %d flows move again, and %d of the %d others", n, again, its, others, len(cold)-its)
		if its == 0 || others > len(cold)/20 {
			t.Errorf("%d endpoints: the first had %d flows, and %d flows of others moved", n, its, others)
		}
	}
}

// testSourceHashKeepsClients checks that the scheduler sh sends the flows of one client to one
// endpoint.
func testSourceHashKeepsClients(t *testing.T) {
	r := newRig(t, newHost(t), Config{Scheduler: SourceHash, Families: []tracker.Family{tracker.IPv4}})
	r.run("ip route add 10.0.0.0/8 via 192.0.2.2")
	endpoints := func(i int) int {
		t.Helper()
		r.set(svc(i, over(v1.ProtocolUDP)), i, -1, -2, -3, -4)
		r.sync()
		used := map[netip.AddrPort]bool{}
		for _, to := range r.flows(i) {
			used[to] = true
		}
		return len(used)
	}
	if n := endpoints(1); n != 1 {
		t.Errorf("a client's flows are sent to %d endpoints, want 1", n)
	}
}

// rolling returns the history of a rolling restart: each endpoint in turn is removed and added
// again.
func rolling(all []int) [][]int {
	out := [][]int{all}
	for i := range all {
		out = append(out, slices.Concat(all[:i], all[i+1:]), all)
	}
	return out
}

// testSourceHashReplacesMissingMaglev removes the kernel module of Maglev. It is not parallel to
// tests that use the module.
func testSourceHashReplacesMissingMaglev(t *testing.T) {
	const file = "/modules/ip_vs_mh.ko"
	if _, err := os.Stat(file); err != nil {
		t.Skip("needs the virtual machine: the test removes a kernel module")
	}
	if out, err := exec.Command("rmmod", "ip_vs_mh").CombinedOutput(); err != nil {
		t.Fatalf("cannot remove the module: %v: %s", err, out)
	}
	defer func() {
		if t.Failed() {
			_ = exec.Command("insmod", file).Run()
		}
	}()
	h := newHost(t)
	err := Probe(t.Context(), Config{NetNS: h.File(), Scheduler: Maglev})
	if !errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), "module ip_vs_mh") {
		t.Errorf("with a missing scheduler: %v, want ErrUnsupported and the module's name", err)
	}
	var log strings.Builder
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if !strings.Contains(log.String(), "module ip_vs_mh") {
		t.Errorf("the log does not name the module: %s", &log)
	}
	r.set(svc(1, nodePort(30001), externalLocal, sticky), 1, 1, -1)
	r.set(svc(2, hashed), 2, -1, -2)
	r.set(svc(3), 3, -1)
	r.sync()
	r.agree()
	internal := fmt.Sprintf("-A -f %d -s ", markDrop+1)
	r.has("ipvsadm -Sn", internal+"sh -b sh-fallback", "-A -t 10.96.0.2:80 -s sh -b sh-fallback", "-A -t 10.96.0.3:80 -s rr")
	must.Get(exec.Command("insmod", file).CombinedOutput())(t)
	r.restart()
	r.sync()
	r.agree()
	r.has("ipvsadm -Sn", internal+"mh -b mh-fallback", "-A -t 10.96.0.2:80 -s mh -b mh-fallback", "-A -t 10.96.0.3:80 -s rr")
}
