//go:build linux

package wholeagent

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/tuning"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/run"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// capabilities returns a set of capabilities of a process, from proc(5).
func capabilities(t *testing.T, pid int, set string) uint64 {
	t.Helper()
	status := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))(t)
	for line := range strings.Lines(string(status)) {
		if name, value, _ := strings.Cut(line, ":"); name == set {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no %s:\n%s", set, status)
	return 0
}

// signalEnv makes the test binary call dropAfterSignal.
const signalEnv = "NODEPROXY_TEST_SIGNAL"

// dropAfterSignal drops privileges after this process got SIGTERM, and prints whether it
// executed the program again.
func dropAfterSignal() {
	_, release := program.UntilSignal()
	what := "executed"
	run.DropPrivileges(slog.New(slog.DiscardHandler), nil, func(bool) {
		what = "stopped"
		_ = unix.Kill(os.Getpid(), unix.SIGTERM)
	}, release)
	fmt.Println(what)
	os.Exit(0)
}

// TestSignalIsKeptWhenPrivilegesAreDropped sends SIGTERM before the program executes itself.
func TestSignalIsKeptWhenPrivilegesAreDropped(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	cmd := netlab.Command(t, "/proc/self/exe")
	cmd.Env = append(os.Environ(), signalEnv+"=1")
	out, err := cmd.Output()
	if string(out) != "stopped\n" || err != nil {
		t.Errorf("%q, %v; want stopped", out, err)
	}
}

// TestOnlyNeededCapabilitiesAreKept starts the agent with every capability, in each mode that
// works here.
func TestOnlyNeededCapabilitiesAreKept(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	var want uint64
	for _, c := range run.Needed(false) {
		want |= 1 << c
	}
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			if mode == "iptables" {
				netlab.NeedPrograms(t, "iptables-restore")
			}
			if all := capabilities(t, os.Getpid(), "CapEff"); all&(1<<unix.CAP_SYS_ADMIN) == 0 {
				t.Fatalf("the test itself has %x", all)
			}
			p := startWith(t, netlab.NewHost(t), []string{"XTABLES_LOCKFILE=" + t.TempDir() + "/lock"}, "run", "--proxy-mode", mode, "--manifests", "../demo/world", "--hostname-override", "node-a", "--oom-score-adj", "0")
			if l := p.line(t); !strings.HasPrefix(l, "synced ") {
				t.Fatal(l)
			}
			for _, set := range []string{"CapEff", "CapPrm", "CapBnd"} {
				if got := capabilities(t, p.Process.Pid, set); got != want {
					t.Errorf("%s is %x, want %x", set, got, want)
				}
			}
		})
	}
}

// TestPinnedProcessCountsAllCPUs pins the agent to one CPU. The limit of connections must
// still be computed for all CPUs of the machine.
func TestPinnedProcessCountsAllCPUs(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	const sysctl = "/proc/sys/net/netfilter/nf_conntrack_max"
	var affinity unix.CPUSet
	must.Do(t, unix.SchedGetaffinity(0, &affinity))
	info, err := os.ReadFile("/proc/cpuinfo") // lists the online CPUs
	if err != nil {
		t.Fatal(err)
	}
	online := strings.Count("\n"+string(info), "\nprocessor\t:")
	netlab.Need(t, online > 1, "two CPUs")
	share := tuning.MaxEntries / online // more than most limits, which are only raised

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
