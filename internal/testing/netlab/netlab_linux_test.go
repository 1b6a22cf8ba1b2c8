package netlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

func TestMain(m *testing.M) { Main(m) }

// pair returns a client and a server with a router between them, in both families.
func pair(t *testing.T) (client, node, server *Host) {
	t.Helper()
	lab, hosts := NewHosts(t, "client", "node", "server")
	client, node, server = hosts["client"], hosts["node"], hosts["server"]
	node.Forward()
	lab.Link(node, "a", client, "eth0")
	lab.Link(node, "b", server, "eth0")
	client.Addrs("eth0", "192.0.2.1/24", "2001:db8:1::1/64")
	node.Addrs("a", "192.0.2.254/24", "2001:db8:1::254/64")
	node.Addrs("b", "198.51.100.254/24", "2001:db8:2::254/64")
	server.Addrs("eth0", "198.51.100.1/24", "2001:db8:2::1/64")
	client.Routes("", "192.0.2.254", "0.0.0.0/0")
	client.Routes("eth0", "2001:db8:1::254", "::/0")
	server.Routes("eth0", "198.51.100.254", "192.0.2.0/24")
	server.Routes("", "2001:db8:2::254", "2001:db8:1::/64")
	return client, node, server
}

// TestRouterForwardsConnections makes connections through a router as soon as its links are up.
func TestRouterForwardsConnections(t *testing.T) {
	for i := range 4 {
		t.Run(fmt.Sprint("lab", i), func(t *testing.T) {
			t.Parallel()
			client, _, server := pair(t)
			for _, host := range []string{"198.51.100.1", "2001:db8:2::1"} {
				addr := net.JoinHostPort(host, "80")
				server.ServeTCP(t, addr, func(c net.Conn) { fmt.Fprint(c, c.RemoteAddr()) })
				ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
				defer cancel()
				for range 3 {
					c := must.Get(client.Dial(ctx, "tcp", "", addr))(t)
					buf := make([]byte, 100)
					n, _ := c.Read(buf)
					if got, want := string(buf[:n]), c.LocalAddr().String(); got != want {
						t.Errorf("server saw %q, client is %q", got, want)
					}
					c.Close()
				}
			}
		})
	}
}

func TestDatagramsReachTheirHost(t *testing.T) {
	client, _, server := pair(t)
	for _, host := range []string{"198.51.100.1", "2001:db8:2::1"} {
		addr := net.JoinHostPort(host, "53")
		l := must.Get(server.ListenPacket("udp", addr))(t)
		defer l.Close()
		c := must.Get(client.Dial(t.Context(), "udp", "", addr))(t)
		defer c.Close()
		must.Get(c.Write([]byte("hello")))(t)
		l.SetReadDeadline(time.Now().Add(testtime.Timeout))
		if _, from, err := l.ReadFrom(make([]byte, 10)); err != nil || from.String() != c.LocalAddr().String() {
			t.Errorf("got a packet from %v (%v), want from %v", from, err, c.LocalAddr())
		}
	}
}

// TestGoroutinesLeaveHosts has many goroutines enter and leave hosts. Outside, none of them may
// be in a host's namespace.
func TestGoroutinesLeaveHosts(t *testing.T) {
	client, node, _ := pair(t)
	before := must.Get(os.Readlink("/proc/thread-self/ns/net"))(t)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			h, want := client, "eth0"
			if i%2 == 0 {
				h, want = node, "a"
			}
			h.Do(func() error {
				if _, err := net.InterfaceByName(want); err != nil {
					t.Errorf("%s: %v", h.Name, err)
				}
				return nil
			})
			// Each thread of this goroutine must be in the original namespace.
			for range 10 {
				if now, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || now != before {
					t.Errorf("namespace %s (%v), want %s", now, err, before)
				}
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
}

func TestCommandsRunOnTheirHost(t *testing.T) {
	client, node, _ := pair(t)
	// A process of the host sees the host's interfaces.
	out, err := client.Output("cat", "/proc/self/net/dev")
	if err != nil || !strings.Contains(out, "eth0:") || strings.Contains(out, " b:") {
		t.Errorf("interfaces %q, %v", out, err)
	}
	if _, err := client.Output("sh", "-c", "echo because >&2; exit 3"); err == nil ||
		!strings.Contains(err.Error(), "because") || !strings.Contains(err.Error(), "client") {
		t.Errorf("error %v should name the host and the reason", err)
	}
	// The path is valid for other processes.
	cmd := exec.Command("stat", "-L", "-c", "%i", node.Path())
	a, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, a)
	}
	b, err := node.Output("stat", "-L", "-c", "%i", "/proc/self/ns/net")
	if err != nil || string(a) != b {
		t.Errorf("namespace %q by path, %q by process, %v", a, b, err)
	}
}

func TestErrorsNameTheHost(t *testing.T) {
	client, node, _ := pair(t)
	for name, err := range map[string]error{
		"no interface":  client.AddAddr("eth7", netip.MustParsePrefix("192.0.2.9/24")),
		"no sysctl":     client.Sysctl("net/ipv4/nonsense", "1"),
		"bad route":     node.AddRoute(netip.MustParsePrefix("203.0.113.0/24"), netip.MustParseAddr("10.9.9.9"), ""),
		"address twice": client.AddAddr("eth0", netip.MustParsePrefix("192.0.2.1/24")),
		"from f":        client.Do(func() error { return os.ErrInvalid }),
	} {
		if err == nil || !strings.Contains(err.Error(), "client") && !strings.Contains(err.Error(), "node") {
			t.Errorf("%s: error %v should name the host", name, err)
		}
	}
	if _, err := client.Dial(t.Context(), "tcp", "", "localhost:80"); err == nil {
		t.Error("a name was resolved")
	}

	lab := New()
	h := lab.Host("h")
	if lab.Err != nil {
		t.Fatal(lab.Err)
	}
	if lab.Host("h"); lab.Err == nil {
		t.Error("two hosts have the same name")
	}
	failed := lab.Err
	if lab.Link(h, "a", h, "b"); lab.Err != failed || h.Do(func() error { _, err := net.InterfaceByName("a"); return err }) == nil {
		t.Errorf("after a failed step another was made: %v", lab.Err)
	}
	if err := errors.Join(lab.Close(), lab.Close()); err != nil {
		t.Error(err)
	}
	if err := h.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if lab.Err = nil; lab.Host("i") == nil || lab.Err == nil {
		t.Error("a closed lab added a host")
	}
}

func TestBridgeJoinsItsPorts(t *testing.T) {
	_, node, server := pair(t)
	must.Do(t, node.AddBridge("br0", "b"))
	must.Do(t, node.AddAddr("br0", netip.MustParsePrefix("203.0.113.1/24")))
	must.Do(t, server.AddAddr("eth0", netip.MustParsePrefix("203.0.113.2/24")))
	l := must.Get(node.Listen("tcp", "203.0.113.1:80"))(t)
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
	defer cancel()
	c := must.Get(server.Dial(ctx, "tcp", "203.0.113.2:4321", "203.0.113.1:80"))(t)
	if c.LocalAddr().String() != "203.0.113.2:4321" {
		t.Errorf("the connection is from %v", c.LocalAddr())
	}
	c.Close()
}

// TestReexecEntersNewNamespaces runs this binary again, outside of its namespaces.
func TestReexecEntersNewNamespaces(t *testing.T) {
	Require(t)
	run := func(env ...string) (string, int) {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestReexecChild$", "-test.v")
		for _, e := range os.Environ() {
			if !strings.HasPrefix(e, InsideEnv+"=") && !strings.HasPrefix(e, requireAllEnv+"=") {
				cmd.Env = append(cmd.Env, e)
			}
		}
		cmd.Env = append(cmd.Env, env...)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	here := must.Get(os.Readlink("/proc/self/ns/net"))(t)
	for want, script := range map[int]string{0: "pass", 1: "fail", 137: "die"} {
		out, code := run("NETLAB_TEST_CHILD=" + script)
		if code != want || strings.Contains(out, here) || !strings.Contains(out, "uid 0 in net:[") {
			t.Errorf("%s: exit code %d, want %d:\n%s", script, code, want, out)
		}
	}
	if out, code := run("NETLAB_TEST_CHILD=need"); code != 0 || !strings.Contains(out, "needs a miracle") {
		t.Errorf("Need does not skip: %d\n%s", code, out)
	}
	if out, code := run("NETLAB_TEST_CHILD=need", requireAllEnv+"=1"); code != 1 || !strings.Contains(out, "needs a miracle") {
		t.Errorf("Need does not fail under %s: %d\n%s", requireAllEnv, code, out)
	}
}

// TestReexecChild is the child of TestReexecEntersNewNamespaces.
func TestReexecChild(t *testing.T) {
	script := os.Getenv("NETLAB_TEST_CHILD")
	if script == "" {
		return
	}
	ns, err := os.Readlink("/proc/self/ns/net")
	fmt.Println("uid", os.Getuid(), "in", ns, err)
	switch script {
	case "fail":
		t.Fail()
	case "die":
		p, _ := os.FindProcess(os.Getpid())
		p.Kill()
		select {}
	case "need":
		Need(t, false, "a miracle")
	}
}
