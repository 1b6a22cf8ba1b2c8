package main

import (
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testtime"
)

// closeSocketsEnv makes nodeproxy close its own netfilter sockets at each SIGUSR1, as
// another part of the process may do by mistake.
const closeSocketsEnv = "NODEPROXY_TEST_CLOSE_SOCKETS"

// closeSocketsOnSignal never returns.
func closeSocketsOnSignal() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	for range signals {
		n, err := closeNetfilterSockets(netfilterSockets)
		fmt.Fprintf(os.Stderr, "closed %d netfilter sockets, error %v\n", n, err)
	}
}

// netfilterSockets is how many netfilter sockets nodeproxy in mode nftables always has: the
// data plane, its Watch and the cleaner of UDP flows have one each. While it searches for the
// tables of a kube-proxy, there is one more.
const netfilterSockets = 3

// closeNetfilterSockets waits until there are at least n sockets and closes all of them.
func closeNetfilterSockets(n int) (closed int, err error) {
	var found []int
	for end := time.Now().Add(testtime.Timeout); len(found) < n && time.Now().Before(end); time.Sleep(time.Millisecond) {
		if found, err = listNetfilterSockets(); err != nil {
			return 0, err
		}
	}
	for _, fd := range found {
		if err := unix.Close(fd); err == unix.EBADF {
			continue // that of a search which has just ended
		} else if err != nil {
			return closed, err
		}
		closed++
	}
	return closed, nil
}

func listNetfilterSockets() (out []int, err error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return nil, err
		}
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		protocol, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if domain == unix.AF_NETLINK && protocol == unix.NETLINK_NETFILTER {
			out = append(out, fd)
		}
	}
	return out, nil
}

// TestClosedSocketsAreReplaced closes the sockets of the data plane and of the cleaner of UDP
// flows in a running agent. The next change must still come into effect, and stale UDP flows
// must be deleted.
func TestClosedSocketsAreReplaced(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	service := webService + "  - {name: dns, protocol: UDP, port: 53}\n"
	slice := func(ips ...string) string {
		return strings.Replace(webSlice(ips...), "- {name: http, port: 8080}\n", "- {name: http, port: 8080}\n- {name: dns, protocol: UDP, port: 5353}\n", 1)
	}
	put(t, dir, "web.yaml", service+"---\n"+slice(podIPs[0]))
	p := startWith(t, s.node, []string{closeSocketsEnv + "=1"}, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s")
	p.synced(t, "services=1 endpoints=2 changed=2")
	s.answeredBy(t, clusterVIP, podIPs[0])
	flow, err := dial(s.client, "udp", "", "10.96.0.10:53", testtime.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Close()
	closedSockets := regexp.MustCompile(`closed [0-9]+ netfilter sockets, error <nil>\n`)
	replaced := func() int { return strings.Count(p.log(), "reopened all netlink sockets") }
	for i, ip := range podIPs[1:] {
		if name, _, err := flow.ask(); err != nil || name != podIPs[i] {
			t.Fatalf("the UDP flow goes to %q, want %s, error %v", name, podIPs[i], err)
		}
		if err := p.Process.Signal(syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the sockets are closed", func() bool {
			return len(closedSockets.FindAllString(p.log(), -1)) == i+1
		})
		put(t, dir, "web.yaml", service+"---\n"+slice(ip))
		p.synced(t, "services=1 endpoints=2 changed=2")
		s.answeredBy(t, clusterVIP, ip)
		eventually(t, "the UDP flow goes to the new endpoint", func() bool {
			name, _, err := flow.ask()
			return err == nil && name == ip
		})
		if n := replaced(); n != i+1 {
			t.Errorf("replaced %d times, want %d; log:\n%s", n, i+1, p.log())
		}
	}
	// Without a change, Watch detects it within a minute.
	if !testtime.Thorough() {
		return
	}
	if err := p.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the sockets are replaced", func() bool { return replaced() == len(podIPs) })
	s.answeredBy(t, clusterVIP, podIPs[2])
}
