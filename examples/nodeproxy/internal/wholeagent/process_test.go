//go:build linux

package wholeagent

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/run"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// capabilities returns a set of capabilities of a process, from proc(5).
func capabilities(t *testing.T, pid int, set string) (n uint64) {
	t.Helper()
	_, rest, _ := strings.Cut(string(must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))(t)), "\n"+set+":")
	must.Get(fmt.Sscanf(rest, "%x", &n))(t)
	return n
}

// onlyNeededCapabilities checks those of a process that started with all.
func (p *process) onlyNeededCapabilities(t *testing.T) {
	t.Helper()
	var want uint64
	for _, c := range run.Needed(false) {
		want |= 1 << c
	}
	for _, set := range []string{"CapEff", "CapPrm", "CapBnd"} {
		if got := capabilities(t, p.Process.Pid, set); got != want {
			t.Errorf("%s is %x, want %x", set, got, want)
		}
	}
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
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			if mode == "iptables" {
				netlab.NeedPrograms(t, "iptables-restore")
			}
			if all := capabilities(t, os.Getpid(), "CapEff"); all&(1<<unix.CAP_SYS_ADMIN) == 0 {
				t.Fatalf("the test itself has %x", all)
			}
			p := start(t, netlab.NewHost(t), "run", "--proxy-mode", mode, "--manifests", "../demo/world", "--hostname-override", "node-a", "--oom-score-adj", "0")
			if l := p.line(t); !strings.HasPrefix(l, "synced ") {
				t.Fatal(l)
			}
			p.onlyNeededCapabilities(t)
		})
	}
}
