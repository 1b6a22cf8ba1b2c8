package takeover

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestProcessOfKubeProxyIsFound starts processes named kube-proxy, and others, in this network
// namespace and in another one.
func TestProcessOfKubeProxyIsFound(t *testing.T) {
	netlab.Require(t)
	sleep := must.Get(exec.LookPath("sleep"))(t)
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
		must.Do(t, os.Symlink(sleep, path))
		cmd := exec.Command("sh", "-c", `"$0" 60 & wait`, path)
		if c.child {
			cmd = exec.Command(path, "60")
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		must.Do(t, c.start(cmd))
		found := false
		for until := time.Now().Add(time.Second); !found && time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
			found = KubeProxyRuns()
		}
		if found != c.want {
			t.Errorf("%s: found %v, want %v", c.what, found, c.want)
		}
		must.Do(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
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
		l := must.Get(net.Listen("tcp", at))(t)
		defer l.Close()
		at = l.Addr().String()
		// A connection does not hide the listener.
		c := must.Get(net.Dial("tcp", at))(t)
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
