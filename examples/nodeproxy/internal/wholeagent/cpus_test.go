//go:build linux

package wholeagent

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestPinnedProcessCountsAllCPUs pins the agent to one CPU. The limit of connections must
// still be computed for all CPUs of the machine.
func TestPinnedProcessCountsAllCPUs(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	const sysctl = "/proc/sys/net/netfilter/nf_conntrack_max"
	var affinity unix.CPUSet
	if err := unix.SchedGetaffinity(0, &affinity); err != nil {
		t.Fatal(err)
	}
	info, err := os.ReadFile("/proc/cpuinfo") // lists the online CPUs
	if err != nil {
		t.Fatal(err)
	}
	online := strings.Count("\n"+string(info), "\nprocessor\t:")
	netlab.Need(t, online > 1, "two CPUs")
	share := conntrack.MaxEntries / online // more than most limits, which are only raised

	// A child inherits the affinity of the thread that starts it. The thread stays locked
	// and ends with its goroutine.
	type result struct {
		out []byte
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		var one unix.CPUSet
		for cpu := range len(affinity) * 64 {
			if affinity.IsSet(cpu) {
				one.Set(cpu)
				break
			}
		}
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			done <- result{nil, err}
			return
		}
		cmd := exec.Command("/proc/self/exe", "run", "--init-only", fmt.Sprintf("--conntrack-max-per-core=%d", share), "--conntrack-min=0",
			"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
		cmd.Env = append(os.Environ(), programEnv+"=1")
		out, err := cmd.CombinedOutput()
		done <- result{out, err}
	}()
	r := <-done
	// The limit cannot be set in the namespace of the tests. The agent logs the limit and the
	// value that it cannot set.
	_, err = os.Stat(sysctl)
	netlab.Need(t, err == nil, "nf_conntrack sysctls in network namespaces")
	want := fmt.Sprintf("%s is ", sysctl)
	if !strings.Contains(string(r.out), want) {
		t.Fatalf("no %q in the log; error %v:\n%s", want, r.err, r.out)
	}
	machine := fmt.Sprintf("cannot be set to at least %d ", online*share)
	if !strings.Contains(string(r.out), machine) {
		t.Errorf("no %q in the log:\n%s", machine, r.out)
	}
}
