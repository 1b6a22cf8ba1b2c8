//go:build linux

package iptables

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

var kills = flag.Int("kills", 0, "how often TestKilledAgentLosesNoConnection kills an agent; 0 means a few times")

// podsEnv is the environment variable with the pods' addresses for a separate process.
const podsEnv = "PROXIER_TEST_PODS"

// churn changes endpoints as fast as possible until it is killed.
func churn(flavor Flavor) error {
	ctx := context.Background()
	p, err := newAgent(ctx, Config{Flavor: flavor, LockFile: os.Getenv(lockEnv), Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		return err
	}
	pods := strings.Fields(os.Getenv(podsEnv))
	p.tracker.SetService(svc(50, nodePort(30050)))
	rng := rand.New(rand.NewPCG(uint64(os.Getpid()), 1))
	for i := 0; ; i++ {
		p.tracker.SetSlice(podSlice(pods, 1+rng.IntN(len(pods)), rng))
		if i%7 == 6 {
			p.cursor.Resync()
		}
		if err := p.cursor.Sync(ctx); err != nil {
			return err
		}
		if i == 0 {
			fmt.Println("ready")
		}
	}
}

// TestKilledAgentLosesNoConnection kills an agent at random points of its work, many times,
// while clients connect to a Service whose endpoints it changes.
func TestKilledAgentLosesNoConnection(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		times := *kills
		if times == 0 {
			times = 5
			if testtime.Thorough() {
				times = 20
			}
		}
		rng := rand.New(rand.NewPCG(5, 5))
		lock := filepath.Join(t.TempDir(), "lock")
		w := conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: newForWorld(flavor)})
		pods := backendtest.Pods(w)
		w.Tracker.SetService(svc(50, nodePort(30050)))
		w.Tracker.SetSlice(podSlice(pods, len(pods), rng))
		w.Sync()
		start := func(int) *exec.Cmd {
			cmd := confine.Command("churn "+string(flavor), confine.Limits{Capabilities: []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}})
			cmd.Env = append(cmd.Env, lockEnv+"="+lock, podsEnv+"="+strings.Join(pods, " "))
			return cmd
		}
		backendtest.Unharmed(t, w, podTargets, func() {
			backendtest.KillAgents(t, w, times, start, func(bool) time.Duration { return time.Duration(rng.IntN(60)) * time.Millisecond })
		})
		// The first sync of the next agent repairs everything.
		r := &rig{TB: t, flavor: onLinux(flavor), node: &linuxNode{}, config: testConfig(t, flavor), tracker: w.Tracker, engine: w.Engine}
		r.config.NetNS, r.config.Families = w.Env.NetNS, w.Env.Families
		w.Tracker.SetSlice(podSlice(pods, 2, rng))
		r.start()
		defer r.backend.Close()
		r.sync()
		text := dump(t, r.backend)
		r.cursor.Resync()
		r.sync()
		if again := dump(t, r.backend); again != text {
			t.Errorf("after a full delta\n%s\nbefore\n%s", again, text)
		}
		if n := strings.Count(text, "-j DNAT"); n != 2 {
			t.Errorf("%d endpoints, want 2:\n%s", n, text)
		}
	})
}

// TestKilledAgentLeavesNoProgram kills an agent while a program that it started waits. The
// program must die with it, before it writes.
func TestKilledAgentLeavesNoProgram(t *testing.T) {
	needFlavor(t, NFT)
	t.Parallel()
	host, dir := netlab.NewHost(t), hangingPrograms(t, NFT)
	cmd := confine.Command("hang", confine.Limits{Capabilities: []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}})
	cmd.Env = append(cmd.Env, scriptsEnv+"="+dir)
	ready, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	must.Do(t, host.Start(cmd))
	must.Get(ready.Read(make([]byte, 1)))(t)
	// The script writes this file before it becomes the program that hangs.
	var hung []string
	for deadline := time.Now().Add(testtime.Timeout); len(hung) == 0 && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if hung, err = filepath.Glob(filepath.Join(dir, "hung.*")); err != nil {
			t.Fatal(err)
		}
	}
	if len(hung) != 1 {
		t.Fatalf("programs that hang: %v", hung)
	}
	var pid int
	must.Get(fmt.Sscanf(filepath.Base(hung[0]), "hung.%d", &pid))(t)
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the program: %v", err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	gone := func() bool {
		// Its new parent may reap it later.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return errors.Is(err, os.ErrNotExist) || strings.Contains(string(stat), ") Z ")
	}
	for deadline := time.Now().Add(testtime.Timeout); !gone(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the program outlived the agent")
		}
	}
}

// scriptsEnv is the environment variable with the folder of a watched node.
const scriptsEnv = "PROXIER_TEST_SCRIPTS"

// hang runs an agent with a program that hangs.
func hang() error {
	dir := os.Getenv(scriptsEnv)
	os.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	p, err := newAgent(context.Background(), Config{Flavor: NFT})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "hang"), nil, 0o644); err != nil {
		return err
	}
	fmt.Println("ready")
	p.tracker.SetService(svc(0))
	return p.cursor.Sync(context.Background())
}

// TestExhaustedFilesLeaveNothingHalfDone uses a process without a spare file descriptor. Its
// syncs must fail with EMFILE and change nothing, and succeed when it has descriptors again.
func TestExhaustedFilesLeaveNothingHalfDone(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		h := netlab.NewHost(t)
		few := uint64(64)
		cmd := confine.Command("few files "+string(flavor), confine.Limits{Capabilities: []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}, Files: &few})
		cmd.Env = append(cmd.Env, lockEnv+"="+filepath.Join(t.TempDir(), "lock"))
		must.Do(t, h.Start(cmd))
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
}

func fewFiles(flavor Flavor) error {
	ctx := context.Background()
	p, err := newAgent(ctx, Config{Flavor: flavor, LockFile: os.Getenv(lockEnv), Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		return err
	}
	text := func() (string, error) {
		out, err := saved(ctx, p.backend.families[0])
		return strings.Join(listingOf(out)["nat KUBE-SERVICES"], "\n"), err
	}
	p.tracker.SetService(svc(0))
	p.tracker.SetSlice(slice(0, tracker.IPv4, 1, 2))
	if err := p.cursor.Sync(ctx); err != nil {
		return err
	}
	before, err := text()
	if err != nil {
		return err
	}
	release := backendtest.ExhaustFiles()
	p.tracker.SetService(svc(1))
	p.tracker.SetSlice(slice(1, tracker.IPv4, 3))
	if err := p.cursor.Sync(ctx); !errors.Is(err, syscall.EMFILE) {
		return fmt.Errorf("without files: %w, want EMFILE", err)
	}
	if err := p.backend.Check(ctx); !errors.Is(err, syscall.EMFILE) {
		return fmt.Errorf("check without files: %w, want EMFILE", err)
	}
	release()
	if now, err := text(); err != nil || now != before {
		return fmt.Errorf("after a failed sync\n%s\nbefore\n%s: %w", now, before, err)
	}
	if err := p.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("with files again: %w", err)
	}
	if now, err := text(); err != nil || !strings.Contains(now, "ns/svc-1:p") {
		return fmt.Errorf("with files again the rules are\n%s: %w", now, err)
	}
	return p.backend.Check(ctx)
}

// TestReadOnlySysctlIsLogged configures NodePorts at loopback addresses while their sysctl is
// read-only. The Services must be served at all other addresses.
func TestReadOnlySysctlIsLogged(t *testing.T) {
	netlab.Require(t)
	needFlavor(t, NFT)
	t.Parallel()
	h := netlab.NewHost(t)
	cmd := confine.Command("sysctl", confine.Limits{Capabilities: []int{unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}})
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	must.Do(t, h.Start(cmd))
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func readOnlySysctl() error {
	const dir = "/proc/sys"
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("remount: %w", err)
	}
	if err := os.WriteFile("/proc/sys/"+routeLocalnet, []byte("1"), 0); !errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("write the sysctl: %w, want EROFS", err)
	}
	ctx := context.Background()
	var log strings.Builder
	p, err := newAgent(ctx, Config{Flavor: NFT, LocalhostNodePorts: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		return err
	}
	p.tracker.SetService(svc(0, nodePort(30000)))
	p.tracker.SetSlice(slice(0, tracker.IPv4, 1))
	if err := p.cursor.Sync(ctx); err != nil {
		return err
	}
	if got := log.String(); !strings.Contains(got, "NodePorts do not answer at loopback addresses") || !strings.Contains(got, "read-only file system") {
		return fmt.Errorf("the log is %s", got)
	}
	out, err := saved(ctx, p.backend.families[0])
	if err != nil || !strings.Contains(out, "--dport 30000") || !strings.Contains(out, "-j DNAT") {
		return fmt.Errorf("the rules are\n%s: %w", out, err)
	}
	return p.backend.Check(ctx)
}
