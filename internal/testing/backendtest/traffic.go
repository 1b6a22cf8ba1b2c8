//go:build linux

package backendtest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// maxReported is the largest number of failed connections to report.
const maxReported = 5

// Pods returns the IPv4 addresses and ports of the world's pods.
func Pods(w *conformance.World) []string {
	var out []string
	for _, p := range w.Pods() {
		out = append(out, netip.AddrPortFrom(p.Addr(tracker.IPv4), p.Ports()[0]).String())
	}
	return out
}

// Unharmed makes connections while f runs. It fails the test if one of them cannot be made, or if
// one that was open before does not live to the end.
func Unharmed(t *testing.T, w *conformance.World, to []conformance.Target, f func()) {
	t.Helper()
	start, held := time.Now(), w.Hold(to)
	c := w.Churn(to, f)
	t.Logf("%d connections in %v, %d failed; %d stayed open", c.Opened, time.Since(start).Round(time.Millisecond), len(c.Failures), held.Len())
	for _, err := range append(c.Failures[:min(len(c.Failures), maxReported)], held.Check()) {
		if err != nil {
			t.Error(err)
		}
	}
}

// KillAgents starts one agent after another on the world's node and kills each after a
// delay. An agent writes to its standard output when it is ready. KillAgents does not wait
// for every third agent to be ready; delay gets false for ready then. start must not set
// Stdout.
func KillAgents(t *testing.T, w *conformance.World, times int, start func(i int) *exec.Cmd, delay func(ready bool) time.Duration) {
	t.Helper()
	waited := 0
	for i := range times {
		cmd := start(i)
		output, err := cmd.StdoutPipe()
		if err != nil {
			t.Error(err)
			return
		}
		if err := w.Do(cmd.Start); err != nil {
			t.Error(err)
			return
		}
		ready := i%3 != 0
		if ready {
			if _, err := output.Read(make([]byte, 1)); err != nil {
				t.Errorf("the agent ended by itself: %v", err)
			}
			waited++
		}
		time.Sleep(delay(ready))
		// Killing fails only if the agent has ended, and waiting reports the signal.
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Logf("killed %d times, %d of them after the agent was ready", times, waited)
}

// OwnServer gives a host the addresses of the node of [NewNode], and starts a UDP server of
// the node itself at port 30080 of every address. It returns the addresses.
func OwnServer(t *testing.T, h *netlab.Host) []netip.Addr {
	t.Helper()
	for _, a := range nodeAddrs {
		if err := h.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	h.ServeUDP(t, "[::]:30080", "own")
	return nodeAddrs
}

// NodeIsRefused sends from the node to NodePort 30080 at the addresses. Every packet of a
// UDP socket and a TCP connection must be refused, as those of a remote client are.
func NodeIsRefused(t *testing.T, h *netlab.Host, at ...netip.Addr) {
	t.Helper()
	for _, a := range at {
		to := netip.AddrPortFrom(a, 30080).String()
		if err := h.RefusedUDP(to, testtime.Timeout); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), testtime.Timeout)
		if c, err := h.Dial(ctx, "tcp", "", to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("TCP to %s: %v, %v", to, c, err)
		}
		cancel()
	}
}

// RefusedSockets opens UDP sockets on the host to the addresses, which must refuse them.
// exchange sends by one of the sockets and returns the answer.
func RefusedSockets(t *testing.T, h *netlab.Host, at ...netip.AddrPort) (exchange func(i int) (string, error)) {
	t.Helper()
	conns := make([]net.Conn, len(at))
	exchange = func(i int) (string, error) {
		if err := conns[i].SetDeadline(time.Now().Add(testtime.Timeout)); err != nil {
			return "", err
		}
		if _, err := conns[i].Write([]byte("hello")); err != nil {
			return "", err
		}
		buf := make([]byte, 64)
		n, err := conns[i].Read(buf)
		return string(buf[:n]), err
	}
	for i, a := range at {
		var err error
		if conns[i], err = h.Dial(t.Context(), "udp", "", a.String()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conns[i].Close() })
		if got, err := exchange(i); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("%s: %q, %v", a, got, err)
		}
	}
	return exchange
}
