package takeover

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestProcessOfKubeProxyIsFound starts processes named kube-proxy, and others, in this network
// namespace and in another one.
func TestProcessOfKubeProxyIsFound(t *testing.T) {
	netlab.Require(t)
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	other := netlab.NewHost(t)
	here := (*exec.Cmd).Start
	for _, c := range []struct {
		what, name string
		child      bool
		start      func(*exec.Cmd) error
		want       bool
	}{
		{"a kube-proxy", "kube-proxy", false, here, true},
		{"a kube-proxy of another network namespace", "kube-proxy", false, other.Start, false},
		{"another program", "kube-proxy-2", false, here, false},
		{"a child of this process", "kube-proxy", true, here, false},
	} {
		path := filepath.Join(t.TempDir(), c.name)
		if err := os.Symlink(sleep, path); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sh", "-c", `"$0" 60 & wait`, path)
		if c.child {
			cmd = exec.Command(path, "60")
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := c.start(cmd); err != nil {
			t.Fatal(err)
		}
		found := false
		for until := time.Now().Add(time.Second); !found && time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
			found = KubeProxyRuns()
		}
		if found != c.want {
			t.Errorf("%s: found %v, want %v", c.what, found, c.want)
		}
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		for until := time.Now().Add(10 * time.Second); KubeProxyRuns(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%s: found after its end", c.what)
			}
		}
	}
}

// TestListenersOfOthersAreNotRoots asks for the owner of a listener, and again in a user namespace
// that has no ID for root.
func TestListenersOfOthersAreNotRoots(t *testing.T) {
	if at := os.Getenv("NODEPROXY_TEST_LISTENER"); at != "" { // without any right
		if ListenerIsRoots(at) {
			t.Errorf("%s is root's", at)
		}
		return
	}
	netlab.Require(t)
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		at = l.Addr().String()
		// A connection does not hide the listener.
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if !ListenerIsRoots(at) {
			t.Errorf("%s is not root's", at)
		}
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), "NODEPROXY_TEST_LISTENER="+at)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("without an ID for root: %v\n%s", err, out)
		}
	}
}
