//go:build linux

package wholeagent

import (
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
)

const routeLocalnet = "net/ipv4/conf/all/route_localnet"

// intruder sends packets from a neighbor to a port of the node's loopback address all the time.
type intruder struct {
	*site
	t        *testing.T
	sent     atomic.Int64
	received atomic.Int64
}

// newIntruder starts an intruder, and checks that its packets arrive if nothing guards the
// loopback range.
func newIntruder(t *testing.T, s *site) *intruder {
	in := &intruder{site: s, t: t}
	for _, args := range []string{"addr del 127.0.0.1/8 dev lo", "route add 127.0.0.1/32 via 192.0.2.1 dev eth0"} {
		must.Get(s.Client.Run(t, "ip", strings.Fields(args)...))(t)
	}
	server := must.Get(s.Node.ListenPacket("udp4", "127.0.0.1:9999"))(t)
	socket := must.Get(s.Client.ListenPacket("udp4", "192.0.2.9:0"))(t)
	t.Cleanup(func() {
		server.Close()
		socket.Close()
	})
	go func() {
		// Without answers each packet belongs to a new connection.
		for b := make([]byte, 16); ; in.received.Add(1) {
			if _, _, err := server.ReadFrom(b); err != nil {
				return
			}
		}
	}()
	go func() {
		to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:9999"))
		for ; ; time.Sleep(time.Millisecond) {
			switch _, err := socket.WriteTo([]byte("x"), to); {
			case err == nil:
				in.sent.Add(1)
			case strings.Contains(err.Error(), "closed"):
				return
			}
		}
	}()
	must.Do(t, s.Node.Sysctl(routeLocalnet, "1"))
	eventually(t, "an unguarded loopback address is reached", func() bool { return in.received.Load() > 0 })
	must.Do(t, s.Node.Sysctl(routeLocalnet, "0"))
	in.wait()
	in.received.Store(0)
	return in
}

// wait waits until some more packets were sent.
func (in *intruder) wait() {
	n := in.sent.Load() + 20
	eventually(in.t, "packets are sent", func() bool { return in.sent.Load() >= n })
}

// keptOut checks that no packet has arrived since the last call, and that route_localnet has
// the value.
func (in *intruder) keptOut(when, value string) {
	in.t.Helper()
	in.wait()
	if n := in.received.Swap(0); n != 0 {
		in.t.Errorf("%s: %d packets of a neighbor reached 127.0.0.1", when, n)
	}
	if got := sysctl(in.t, in.Node, routeLocalnet); got != value {
		in.t.Errorf("%s: route_localnet is %s, want %s", when, got, value)
	}
}

// guard reports whether the node has the guard.
func (in *intruder) guard() bool {
	in.t.Helper()
	text := must.Get(in.Node.Run(in.t, "iptables-save", "-t", "filter"))(in.t)
	return strings.Contains(text, "KUBE-PROXY-LOCALNET")
}

// TestNeighborsNeverReachLoopback sends packets from a neighbor to the node's loopback address
// while the agent sets route_localnet, in all states in which the sysctl can be.
func TestNeighborsNeverReachLoopback(t *testing.T) {
	t.Parallel()
	needMode(t, "iptables")
	in := newIntruder(t, newSite(t))
	dir := t.TempDir()
	rollOut(t, dir, podIPs...)
	flags := []string{"--conntrack-max-per-core", "0"}
	once := func(args ...string) {
		t.Helper()
		if code, _, log := verb(t, in.Node, append(append([]string{"run"}, args...), flags...)...); code != 0 {
			t.Fatalf("%q: exit status %d, log:\n%s", args, code, log)
		}
	}
	serve := func(env []string, args ...string) *process {
		t.Helper()
		p := startWith(t, in.Node, env, append(append([]string{"run", "--manifests", dir, "--hostname-override", "n1"}, args...), flags...)...)
		p.synced(t, "services=1 endpoints=3 changed=1")
		return p
	}
	end := func(p *process, s syscall.Signal) {
		t.Helper()
		p.Process.Signal(s)
		p.exit(t)
	}
	iptables, nftables := "--proxy-mode=iptables", "--proxy-mode=nftables"

	once("--init-only", iptables)
	in.keptOut("after --init-only", "1")
	p := serve([]string{readOnlyEnv + "=1"}, iptables)
	in.keptOut("mode iptables runs", "1")
	if y := lab.Visits(in.Node, "", "127.0.0.1:30080", 20); !y.Answered(podIPs...) {
		t.Errorf("the NodePort at the loopback address is answered by %v, want %v", y, podIPs)
	}
	end(p, syscall.SIGTERM)
	in.keptOut("mode iptables stopped", "1")
	p = serve(nil, nftables)
	eventually(t, "the guard is gone", func() bool { return !in.guard() })
	in.keptOut("after a switch to mode nftables", "0")
	end(p, syscall.SIGTERM)

	p = serve(nil, iptables)
	in.keptOut("mode iptables runs without --init-only", "1")
	end(p, syscall.SIGKILL)
	once("--cleanup")
	in.keptOut("--cleanup after a crash", "0")
	if in.guard() {
		t.Error("--cleanup left the guard, although route_localnet is 0")
	}

	once("--init-only", iptables)
	once("--cleanup")
	in.keptOut("--cleanup after --init-only", "0")
	if in.guard() {
		t.Error("--cleanup left the guard of --init-only")
	}

	end(serve(nil, iptables), syscall.SIGTERM)
	end(serve(nil, iptables, "--iptables-localhost-nodeports=false"), syscall.SIGTERM)
	in.keptOut("without NodePorts at loopback addresses", "0")
	if in.guard() {
		t.Error("the guard stayed, although route_localnet is 0")
	}

	// An agent that cannot set the sysctl back keeps the guard. --init-only sets it back.
	end(serve(nil, iptables), syscall.SIGTERM)
	p = serve([]string{readOnlyEnv + "=1"}, nftables)
	p.logged(t, "route_localnet stays")
	in.keptOut("after a switch with a read-only /proc/sys", "1")
	once("--init-only", nftables)
	in.keptOut("after --init-only of mode nftables", "0")
	end(p, syscall.SIGTERM)
}
