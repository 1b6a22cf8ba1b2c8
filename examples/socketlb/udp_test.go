//go:build linux

package socketlb

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// socket opens an unconnected UDP socket in the cgroup.
func (l *lab) socket(h *netlab.Host, at string) (c net.PacketConn) {
	l.Helper()
	must.Do(l, l.Do(func() (err error) {
		c, err = h.ListenPacket("udp", at)
		return err
	}))
	l.Cleanup(func() { c.Close() })
	return c
}

// ask sends a datagram and returns the answer's text, which is its endpoint, and its source.
func ask(c net.PacketConn, to string, wait time.Duration) (endpoint, from string, err error) {
	if _, err := c.WriteTo([]byte("who?"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))); err != nil {
		return "", "", err
	}
	if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return "", "", err
	}
	buf := make([]byte, 64)
	n, addr, err := c.ReadFrom(buf)
	if err != nil {
		return "", "", err
	}
	return string(buf[:n]), netip.MustParseAddrPort(addr.String()).String(), nil
}

// udp sets Services over UDP.
func (l *lab) udp(endpoints int, services ...string) {
	for i, s := range services {
		l.set(s, i+1, endpoints, backendtest.Over(v1.ProtocolUDP), backendtest.NodePort(int32(30080+i)), backendtest.ExternalLocal)
	}
	l.sync()
}

// TestDatagramsOfOneSocketReachSeveralServices sends from one port to several Services. Each
// answer must come from the address that the datagram was sent to, and from the same
// endpoint each time.
func TestDatagramsOfOneSocketReachSeveralServices(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.set("dns", 1, 2, backendtest.Over(v1.ProtocolUDP), backendtest.NodePort(30080), backendtest.ExternalLocal)
	// Other endpoints: one socket gets answers of an endpoint from one address.
	l.set("log", 2, 0, backendtest.Over(v1.ProtocolUDP))
	for f, a := range map[tracker.Family]string{tracker.IPv4: endpoints4[2], tracker.IPv6: endpoints6[2]} {
		l.tracker.SetSlice(backendtest.Slice(name("log"), f.String(), f, "web", v1.ProtocolUDP, backendtest.Endpoint(a, "other")))
	}
	l.sync()
	for _, h := range []*netlab.Host{l.pod, l.nodeNS} {
		for _, family := range []struct {
			any string
			to  []string
		}{
			{"0.0.0.0:0", []string{"10.96.0.1:80", "10.96.0.2:80"}},
			{"[::]:0", []string{"[fd00:10:96::1]:80", "[fd00:10:96::2]:80"}},
			{"[::]:0", []string{"10.96.0.1:80", "[fd00:10:96::2]:80"}}, // IPv4-mapped
			{"0.0.0.0:0", []string{nodeAddr4 + ":30080", "10.96.0.2:80"}},
		} {
			c := l.socket(h, family.any)
			first := map[string]string{}
			for range 20 {
				for _, to := range family.to {
					endpoint, from, err := ask(c, to, testtime.Timeout)
					if err != nil {
						t.Fatalf("%s to %s: %v", h.Name, to, err)
					}
					if got := netip.MustParseAddrPort(from); netip.AddrPortFrom(got.Addr().Unmap(), got.Port()) != netip.MustParseAddrPort(to) {
						t.Errorf("%s to %s: the answer came from %s", h.Name, to, from)
					}
					if first[to] == "" {
						first[to] = endpoint
					}
					if endpoint != first[to] {
						t.Errorf("%s to %s: %s answered, before it was %s", h.Name, to, endpoint, first[to])
					}
				}
			}
		}
	}
}

// TestDatagramsAreDistributed opens many sockets of either kind.
func TestDatagramsAreDistributed(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.udp(2, "dns")
	for _, connected := range []bool{false, true} {
		got := map[string]int{}
		for range 40 {
			var endpoint string
			var err error
			if connected {
				endpoint, err = l.connected(l.pod, "10.96.0.1:80")
			} else {
				c := l.socket(l.pod, "0.0.0.0:0")
				endpoint, _, err = ask(c, "10.96.0.1:80", testtime.Timeout)
			}
			if err != nil {
				t.Fatal(err)
			}
			got[endpoint]++
		}
		if len(got) != 2 {
			t.Errorf("connected %v: reached %v", connected, got)
		}
	}
	if n := l.counters(); n.Pods != 80 {
		t.Errorf("counters are %+v, want 80 of pods", n)
	}
}

// connected asks over a new connected socket.
func (l *lab) connected(h *netlab.Host, to string) (string, error) {
	c, err := l.dial(h, "udp", "", to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if c.RemoteAddr().String() != to {
		return "", fmt.Errorf("getpeername returns %s", c.RemoteAddr())
	}
	return talk(c)
}

// talk exchanges a datagram over a connected socket, and checks the source of the answer.
func talk(c net.Conn) (string, error) {
	if err := c.SetDeadline(time.Now().Add(testtime.Timeout)); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("who?")); err != nil {
		return "", err
	}
	buf := make([]byte, 64)
	n, from, err := c.(*net.UDPConn).ReadFrom(buf)
	if err == nil && from.String() != c.RemoteAddr().String() {
		err = fmt.Errorf("the answer came from %s, not from %s", from, c.RemoteAddr())
	}
	return string(buf[:n]), err
}

// TestDatagramsFollowEndpoints removes the endpoint that a socket uses.
func TestDatagramsFollowEndpoints(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.udp(2, "dns")
	c := l.socket(l.pod, "0.0.0.0:0")
	first, _, err := ask(c, "10.96.0.1:80", testtime.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	used := endpoints4[0]
	other := endpoints4[1]
	if first != used+":8080" {
		used, other = other, used
	}
	// An endpoint that terminates and still serves keeps the socket.
	yes, no := true, false
	leaving := backendtest.Endpoint(used, "other")
	leaving.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
	for _, step := range []struct {
		endpoints []discovery.Endpoint
		want      string
	}{
		{[]discovery.Endpoint{leaving, backendtest.Endpoint(other, "other")}, used},
		{[]discovery.Endpoint{backendtest.Endpoint(other, "other")}, other},
		{[]discovery.Endpoint{backendtest.Endpoint(used, "other"), backendtest.Endpoint(other, "other")}, other},
	} {
		l.tracker.SetSlice(backendtest.Slice(name("dns"), "IPv4", tracker.IPv4, "web", v1.ProtocolUDP, step.endpoints...))
		l.sync()
		for range 8 {
			if got, from, err := ask(c, "10.96.0.1:80", testtime.Timeout); err != nil || got != step.want+":8080" || from != "10.96.0.1:80" {
				t.Errorf("%q from %q, %v; want %s", got, from, err, step.want)
			}
		}
	}
}

// TestConnectedSocketEndsWithItsEndpoint removes the endpoint of a connected socket. The process
// gets an error immediately and not a time-out.
func TestConnectedSocketEndsWithItsEndpoint(t *testing.T) {
	t.Parallel()
	for _, to := range []string{"10.96.0.1:80", "[fd00:10:96::1]:80", nodeAddr4 + ":30080"} {
		for _, on := range []string{"pod", "node"} {
			t.Run(on+" to "+to, func(t *testing.T) {
				l := newLab(t, nil)
				l.udp(1, "dns")
				h := l.pod
				if on == "node" {
					h = l.nodeNS
				}
				c := must.Get(l.dial(h, "udp", "", to))(t)
				defer c.Close()
				must.Get(talk(c))(t)
				l.started(h)
				ended := make(chan error, 1)
				must.Do(t, c.SetDeadline(time.Now().Add(testtime.Timeout)))
				go func() {
					_, err := c.Read(make([]byte, 1))
					ended <- err
				}()
				l.udp(0, "dns")
				switch err := <-ended; {
				case errors.Is(err, os.ErrDeadlineExceeded):
					t.Error("the socket waits for an endpoint that is gone")
				case !errors.Is(err, unix.ECONNABORTED):
					t.Errorf("%v, want ECONNABORTED", err)
				}
			})
		}
	}
}

// reads waits for the error of a socket that gets no datagram.
func reads(c net.Conn, wait time.Duration) error {
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 1))
	return err
}

// started starts a process in a host, by which a Backend finds the host's network namespace.
func (l *lab) started(h *netlab.Host) {
	l.Helper()
	process := exec.Command("sleep", "600")
	must.Do(l, h.Start(process))
	l.Cleanup(func() { process.Process.Kill(); process.Wait() })
}

// TestConnectedSocketEndsAfterRestart removes the endpoint of one connected socket, and the Service
// of another one, while no process runs.
func TestConnectedSocketEndsAfterRestart(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.udp(2, "dns", "log", "other")
	l.started(l.pod)
	open := func(to string) net.Conn {
		c := must.Get(l.dial(l.pod, "udp", "", to))(t)
		t.Cleanup(func() { c.Close() })
		must.Get(talk(c))(t)
		return c
	}
	gone := []net.Conn{open("10.96.0.1:80"), open(nodeAddr4 + ":30080"), open("[fd00:10:96::1]:80"), open("10.96.0.2:80")}
	stays := open("10.96.0.3:80")
	must.Do(t, l.backend.Close())
	l.set("dns", 1, 0, backendtest.Over(v1.ProtocolUDP), backendtest.NodePort(30080), backendtest.ExternalLocal)
	l.tracker.DeleteService(name("log"))
	c := l.config()
	l.start(c)
	l.sync()
	for _, c := range gone {
		if err := reads(c, testtime.Timeout); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("%s: %v, want ECONNABORTED", c.RemoteAddr(), err)
		}
	}
	if _, err := talk(stays); err != nil {
		t.Errorf("a socket whose endpoint stays: %v", err)
	}
}

// TestSocketsThatCannotBeEndedAreReportedOnce ends sockets of a pod twice: without a process in /proc
// by which the pod is found, without the capabilities to enter its network namespace, and with both.
func TestSocketsThatCannotBeEndedAreReportedOnce(t *testing.T) {
	t.Parallel()
	const line = "cannot end UDP sockets in other network namespaces"
	for _, c := range []struct {
		what             string
		process, confine bool
		lines            int // of the log; 0 if the sockets are ended
	}{
		{"no process", false, false, 1},
		{"no capabilities", true, true, 1},
		{"both", true, false, 0},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			var log strings.Builder
			l := newLab(t, func(c *Config, _ *ruleset.Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
			if c.process {
				l.started(l.pod)
			}
			for range 2 {
				l.udp(1, "dns")
				conn := must.Get(l.dial(l.pod, "udp", "", "10.96.0.1:80"))(t)
				must.Get(talk(conn))(t)
				l.set("dns", 1, 0, backendtest.Over(v1.ProtocolUDP), backendtest.NodePort(30080), backendtest.ExternalLocal)
				// The Backend works in the node's network namespace, as the agent does.
				must.Do(t, l.nodeNS.Do(func() error {
					if !c.confine {
						return l.cursor.Sync(t.Context())
					}
					return withoutCapabilities(func() error { return l.cursor.Sync(t.Context()) }, unix.CAP_SYS_ADMIN, unix.CAP_SYS_PTRACE)
				}))
				if err := reads(conn, 100*time.Millisecond); errors.Is(err, unix.ECONNABORTED) != (c.lines == 0) {
					t.Errorf("%v, want %d lines", err, c.lines)
				}
				conn.Close()
			}
			if text := log.String(); strings.Count(text, line) != c.lines || strings.Count(text, "\n") != c.lines {
				t.Errorf("want %d lines:\n%s", c.lines, text)
			}
		})
	}
}

// withoutCapabilities calls f on this thread without some of its effective capabilities.
func withoutCapabilities(f func() error, capabilities ...int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	if err := unix.Capget(&header, &all[0]); err != nil {
		return err
	}
	less := all
	for _, c := range capabilities {
		less[c/32].Effective &^= 1 << (c % 32)
	}
	if err := unix.Capset(&header, &less[0]); err != nil {
		return err
	}
	return errors.Join(f(), unix.Capset(&header, &all[0]))
}

// TestAnswersComeFromTheRightAddress sends from one socket to two Services with the same
// endpoint. The second one is left alone, because both answers would have one source.
func TestAnswersComeFromTheRightAddress(t *testing.T) {
	t.Parallel()
	l := newLab(t, nil)
	l.udp(1, "dns", "log")
	c := l.socket(l.pod, "0.0.0.0:0")
	if _, from, err := ask(c, "10.96.0.1:80", testtime.Timeout); err != nil || from != "10.96.0.1:80" {
		t.Fatalf("from %s, %v", from, err)
	}
	before := l.counters()
	if got, from, err := ask(c, "10.96.0.2:80", 100*time.Millisecond); err == nil {
		t.Errorf("%s answered from %s", got, from)
	}
	if after := l.counters(); after != before {
		t.Errorf("counters are %+v, before %+v", after, before)
	}
	other := l.socket(l.pod, "0.0.0.0:0")
	if _, from, err := ask(other, "10.96.0.2:80", testtime.Timeout); err != nil || from != "10.96.0.2:80" {
		t.Errorf("another socket: from %s, %v", from, err)
	}
}

// lookup sends two datagrams from a new socket, together or one after the other, and returns the
// number of answers.
func lookup(to string, connected, together bool, wait time.Duration) (answers int, err error) {
	server := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))
	var c *net.UDPConn
	send := func() error { _, err := c.Write([]byte("who?")); return err }
	if connected {
		c, err = net.DialUDP("udp4", nil, server)
	} else {
		c, err = net.ListenUDP("udp4", nil)
		send = func() error { _, err := c.WriteTo([]byte("who?"), server); return err }
	}
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		return 0, err
	}
	if together {
		other := make(chan error, 1)
		go func() { other <- send() }()
		err = errors.Join(send(), <-other)
	} else {
		err = errors.Join(send(), send())
	}
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 64)
	for ; answers < 2; answers++ {
		if _, err := c.Read(buf); err != nil {
			return answers, err
		}
	}
	return answers, nil
}

var lookupsFor = flag.Duration("lookups", time.Second, "how long TestParallelLookupsLoseNothing makes look-ups")

// TestParallelLookupsLoseNothing makes look-ups of two datagrams at a time, as resolvers do for
// A and AAAA, from one pod: 2,000 at a time in its long form, for as long as -lookups says. None may be
// lost through sockets. What is lost through package nftables, where both datagrams begin one flow
// of connection tracking at the same time, is logged.
func TestParallelLookupsLoseNothing(t *testing.T) {
	t.Parallel()
	parallel := 50
	if os.Getenv("PROXIER_THOROUGH") != "" {
		parallel = 2000
	}
	for _, name := range []string{"nftables", "socketlb"} {
		// A node of its own: entries of connection tracking last for 30 s, and new flows
		// with the same tuple would be translated.
		ways := benchWays(t, 10)
		w := ways[slices.IndexFunc(ways, func(w way) bool { return w.name == name })]
		before := dropped(t)
		var sent, lost atomic.Int64
		var wg sync.WaitGroup
		until := time.Now().Add(*lookupsFor)
		for range parallel {
			wg.Go(func() {
				for time.Now().Before(until) {
					err := w.group.Do(func() error {
						return w.client.Do(func() error {
							answers, err := lookup(w.lookup, true, true, testtime.Timeout)
							sent.Add(2)
							lost.Add(int64(2 - answers))
							if errors.Is(err, os.ErrDeadlineExceeded) {
								return nil
							}
							return err
						})
					})
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		excused := dropped(t) - before
		t.Logf("%s: %d datagrams, %d answers lost; the machine dropped %d packets", w.name, sent.Load(), lost.Load(), excused)
		if w.name == "socketlb" && lost.Load() > excused {
			t.Errorf("%d of %d answers were lost", lost.Load(), sent.Load())
		}
	}
}

// dropped returns the number of packets that this machine has dropped because a processor's queue
// was full (net.core.netdev_max_backlog), in all network namespaces.
func dropped(t *testing.T) (n int64) {
	t.Helper()
	text := must.Get(os.ReadFile("/proc/net/softnet_stat"))(t)
	for line := range strings.Lines(string(text)) {
		one := must.Get(strconv.ParseInt(strings.Fields(line)[1], 16, 64))(t)
		n += one
	}
	return n
}
