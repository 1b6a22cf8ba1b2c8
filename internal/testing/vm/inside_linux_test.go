package vm_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// TestMachineHasKernelAndTools runs in the machine.
func TestMachineHasKernelAndTools(t *testing.T) {
	testtime.NeedThorough(t) // the tests in machines show it, too
	if !vm.Inside(t, vm.Debian) {
		return
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	if !strings.HasSuffix(release, "-amd64") {
		t.Errorf("the kernel is %s, not one of Debian's", release)
	}
	netlab.Require(t)
	for _, tool := range []string{"nft", "iptables-save", "conntrack"} {
		path, err := exec.LookPath(tool)
		if err == nil {
			err = exec.Command(path, "--version").Run()
		}
		netlab.Need(t, err == nil, tool+" in the machine")
	}
	for _, path := range []string{"/proc/net/ip_vs", "/proc/sys/net/netfilter/nf_conntrack_max"} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	content, err := os.ReadFile("testdata/sub/file")
	if err != nil || string(content) != "testdata is copied\n" {
		t.Errorf("%q, %v", content, err)
	}
}

// childEnv is set in the environment of tests that other tests run.
const childEnv = "PROXIER_VM_TEST_CHILD"

// inChild reports true in a machine that runs a test of a test.
func inChild(t *testing.T) bool {
	t.Helper()
	if os.Getenv(childEnv) == "" {
		t.Skip("runs as a child of TestEndsInMachineAreReported")
	}
	return vm.Inside(t, vm.Debian)
}

func TestChildSkips(t *testing.T) {
	if inChild(t) {
		t.Skip("skipped in the machine")
	}
}

func TestChildFails(t *testing.T) {
	if inChild(t) {
		t.Fatal("failed in the machine")
	}
}

func TestChildExits(t *testing.T) {
	if inChild(t) {
		os.Exit(0)
	}
}

// TestChildLeavesProcess leaves a process, a temporary file and a mark.
func TestChildLeavesProcess(t *testing.T) {
	if !inChild(t) {
		return
	}
	if err := exec.Command("sleep", "100000").Start(); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/tmp/left", "/run/left"} {
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestChildFindsNothing must find the mark, which shows that it runs in the same machine, alone.
func TestChildFindsNothing(t *testing.T) {
	if !inChild(t) {
		return
	}
	if _, err := os.Stat("/run/left"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("/tmp/left"); err == nil {
		t.Error("a temporary file is left")
	}
	if out, err := netlab.Command(t, "pidof", "sleep").Output(); err == nil {
		t.Errorf("process %s is left", out)
	}
}

func TestChildWaitsForever(t *testing.T) {
	if inChild(t) {
		<-make(chan int)
	}
}

func TestChildCrashes(t *testing.T) {
	if !inChild(t) {
		return
	}
	if err := os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0); err != nil {
		t.Error(err)
	}
	select {}
}

func TestChildFollowsCrash(t *testing.T) {
	if inChild(t) {
		t.Log("in another machine")
	}
}

// TestEndsInMachineAreReported has tests in a machine end in every way.
func TestEndsInMachineAreReported(t *testing.T) {
	if os.Getenv(childEnv) != "" {
		t.Skip("runs in the machine already")
	}
	testtime.NeedComplete(t)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestChild", "-test.v", "-test.paniconexit0", "-test.timeout=20m")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.CombinedOutput()
	if bytes.Contains(out, []byte("a virtual machine: ")) {
		t.Skipf("%s", out)
	}
	if err == nil {
		t.Error("the process succeeded")
	}
	for _, want := range []string{
		`^--- SKIP: TestChildSkips `, `skipped in the machine`,
		`^--- FAIL: TestChildFails `, `failed in the machine`,
		`^--- FAIL: TestChildExits `, `the process succeeded but did not run the test`,
		`^--- PASS: TestChildLeavesProcess `,
		`^--- PASS: TestChildFindsNothing `,
		`^--- FAIL: TestChildWaitsForever `, `exit status 2`,
		`^--- FAIL: TestChildCrashes `, `the machine ended without the test's status`,
		`^--- PASS: TestChildFollowsCrash `, `in another machine`,
	} {
		if !regexp.MustCompile("(?m)" + want).Match(out) {
			t.Errorf("%q is missing", want)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}

// TestExecReturnsStatusAndOutput runs a test that fails in a machine, and then none.
func TestExecReturnsStatusAndOutput(t *testing.T) {
	testtime.NeedThorough(t) // the tests in machines show it, too
	t.Setenv(childEnv, "1")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	status, err := vm.Exec(t.Context(), [][]string{
		{program, "-test.run=^TestChildFails$", "-test.testlogfile=/nowhere/log"}, {program, "-test.run=^TestOther$"},
	}, &out)
	netlab.Need(t, !errors.Is(err, vm.ErrMissing), fmt.Sprintf("a virtual machine: %v", err))
	if err != nil {
		t.Fatal(err)
	}
	if status != 1 || !bytes.Contains(out.Bytes(), []byte("failed in the machine")) || !bytes.HasSuffix(out.Bytes(), []byte("PASS\n")) {
		t.Errorf("status %d, output:\n%s", status, out.Bytes())
	}
}
