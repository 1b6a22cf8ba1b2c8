package vm_test

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// TestMachineHasKernelAndTools runs in the machine.
func TestMachineHasKernelAndTools(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a machine")
	}
	if !vm.Inside(t, vm.Debian, "") {
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

// endEnv names the way in which TestMachineChild ends.
const endEnv = "PROXIER_VM_TEST_END"

// TestMachineChild is the test that other tests run in a machine.
func TestMachineChild(t *testing.T) {
	how := os.Getenv(endEnv)
	if how == "" {
		t.Skip("runs as a child of TestEndInMachineIsReported")
	}
	if !vm.Inside(t, vm.Debian, "") {
		return
	}
	switch how {
	case "skip":
		t.Skip("skipped in the machine")
	case "fail":
		t.Fatal("failed in the machine")
	case "exit":
		os.Exit(0)
	case "crash":
		if err := os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0); err != nil {
			t.Error(err)
		}
		select {}
	}
}

// TestEndInMachineIsReported has a test in the machine end in every way.
func TestEndInMachineIsReported(t *testing.T) {
	if os.Getenv(endEnv) != "" {
		t.Skip("runs in the machine already")
	}
	testtime.NeedThorough(t)
	for _, c := range []struct {
		how  string
		ok   bool
		want string
	}{
		{"skip", true, "--- SKIP: TestMachineChild "},
		{"fail", false, "failed in the machine"},
		{"exit", false, "the process succeeded but did not run the test"},
		{"crash", false, "the machine ended without the test's status"},
	} {
		t.Run(c.how, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestMachineChild$", "-test.v", "-test.paniconexit0")
			cmd.Env = append(os.Environ(), endEnv+"="+c.how)
			out, err := cmd.CombinedOutput()
			if bytes.Contains(out, []byte("SKIP: TestMachineChild ")) && c.how != "skip" {
				t.Skipf("%s", out)
			}
			if (err == nil) != c.ok || !bytes.Contains(out, []byte(c.want)) {
				t.Errorf("%v; %q is missing or the status is wrong in:\n%s", err, c.want, out)
			}
		})
	}
}
