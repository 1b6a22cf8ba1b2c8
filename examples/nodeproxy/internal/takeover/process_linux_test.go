package takeover

import (
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
