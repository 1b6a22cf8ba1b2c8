package netlab

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
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
