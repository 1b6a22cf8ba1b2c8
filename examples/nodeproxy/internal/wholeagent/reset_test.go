//go:build linux

package wholeagent

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// talkTo opens connections from a host to the Service until one goes to the pod.
func talkTo(t *testing.T, h *netlab.Host, pod string) *lab.Talk {
	t.Helper()
	for range 200 {
		c := must.Get(lab.Dial(h, "tcp", "", clusterVIP, testtime.Timeout))(t)
		name, _, err := c.Hear()
		if err != nil {
			t.Fatal(err)
		}
		if name == pod {
			t.Cleanup(func() { c.Close() })
			return c
		}
		c.Close()
	}
	t.Fatalf("no connection reached %s", pod)
	return nil
}

// TestConnectionsToVanishedEndpointsEnd lets a pod fall silent and vanish. The connections of a
// client and of a process of the node end, other connections stay, and nothing is left of it in a
// run without the flag and after --cleanup.
func TestConnectionsToVanishedEndpointsEnd(t *testing.T) {
	t.Parallel()
	for _, mode := range explainedModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			netlab.NeedPrograms(t, "nft")
			s := newSite(t)
			const metricsAt = "192.0.2.1:10249"
			flags := []string{"--proxy-mode", mode, "--metrics-bind-address", metricsAt}
			p := s.serveWeb(t, podIPs, append(flags, "--reset-connections-of-vanished-endpoints=100ms")...)
			gone, stays := talkTo(t, s.Client, podIPs[0]), talkTo(t, s.Client, podIPs[1])
			silent := talkTo(t, s.Node, podIPs[0])
			read := make(chan error, 1)
			go func() {
				_, _, err := silent.Hear() // it sends nothing
				read <- err
			}()
			out, err := s.pods.Run(t, "nft", "add table ip test; add chain ip test in { type filter hook prerouting priority -300; }; add rule ip test in ip daddr "+podIPs[0]+" drop")
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			p.web(t, podIPs[1:]...)
			p.logged(t, "ending connections to vanished endpoints")
			if _, _, err := gone.Ask(); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("a client of the pod that vanished: %v, want a reset", err)
			}
			if name, _, err := stays.Ask(); name != podIPs[1] || err != nil {
				t.Errorf("a client of another pod: %q, %v", name, err)
			}
			const destroyed = "1"
			switch err := <-read; {
			case errors.Is(err, os.ErrDeadlineExceeded):
				netlab.Need(t, false, "SOCK_DESTROY (CONFIG_INET_DIAG_DESTROY)")
			case !errors.Is(err, unix.ECONNABORTED):
				t.Errorf("a silent process of the node: %v, want ECONNABORTED", err)
			}
			_, page, _ := get(t, s.Client, "http://"+metricsAt+"/metrics")
			for _, want := range []string{"proxier_vanished_endpoints_total 1", "proxier_vanished_endpoints_destroyed_sockets_total " + destroyed} {
				if !strings.Contains(page, "\n"+want+"\n") {
					t.Errorf("/metrics has no %q", want)
				}
			}
			hasTable := func() bool {
				t.Helper()
				out, err := s.Node.Run(t, "nft", "list tables")
				if err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				return strings.Contains(out, "proxier-reset")
			}
			if !hasTable() {
				t.Error("no table proxier-reset")
			}
			stop := func() { t.Helper(); p.stop(t) }
			stop()
			// The endpoint returns, and gets connections from a new run.
			must.Get(s.pods.Run(t, "nft", "delete table ip test"))(t)
			p = s.serveWeb(t, podIPs, append(flags, "--reset-connections-of-vanished-endpoints=100ms")...)
			talkTo(t, s.Client, podIPs[0])
			stop()
			p = s.serveWeb(t, podIPs, flags...)
			eventually(t, "a run without the flag removes the table", func() bool { return !hasTable() })
			stop()
			p = s.serveWeb(t, podIPs, append(flags, "--reset-connections-of-vanished-endpoints=1h")...)
			stop()
			if !hasTable() {
				t.Fatal("no table proxier-reset before --cleanup")
			}
			if cleanup(t, s.Node); hasTable() {
				t.Error("--cleanup leaves the table")
			}
		})
	}
}
