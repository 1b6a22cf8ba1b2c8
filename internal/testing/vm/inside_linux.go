package vm

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Kind is the kind of kernel that a test needs.
type Kind int

const (
	// IPVS is a kernel with IPVS and a process that may use it, which needs root in
	// the initial user namespace. It is the running kernel, in a new network namespace,
	// if possible, and otherwise the machine's.
	IPVS Kind = iota
	// Debian is the machine's kernel.
	Debian
)

// insideEnv marks the process that Inside started.
const insideEnv = "PROXIER_VM_INSIDE"

// Inside reports true in a process that Inside started in a kernel of the kind. In any
// other process it starts the test binary in such a kernel, for this test or benchmark
// alone, waits for its end, gives tb the same result, and reports false. It passes the
// command line's flags on, including the test's own, so that -run, -v and -bench have
// the same meaning there. If they select no subtests, it runs the subtests that the pattern
// subtests matches, or all if the pattern is empty.
//
// A top-level test must call it, before t.Parallel.
func Inside(tb testing.TB, kind Kind, subtests string) bool {
	tb.Helper()
	if os.Getenv(insideEnv) != "" {
		return true
	}
	if strings.Contains(tb.Name(), "/") {
		tb.Fatal("vm.Inside is for top-level tests")
	}
	if kind == IPVS && nativeIPVS() {
		native(tb, subtests).run(tb)
		return false
	}
	h, err := findHost()
	if err != nil {
		netlab.Need(tb, false, "a virtual machine: "+err.Error())
	}
	program, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	timeout := remaining(tb)
	ctx, cancel := context.WithTimeout(context.Background(), timeout+grace)
	tb.Cleanup(cancel)
	for range boots {
		cmd, err := h.boot(ctx, tb.TempDir(), program, arguments(tb, timeout, subtests))
		if err != nil {
			tb.Fatal(err)
		}
		if cmd.run(tb) {
			return false
		}
	}
	tb.Fatalf("the machine did not start the test in %d attempts", boots)
	return false
}

// nativeIPVS reports whether IPVS can be used by a child of this process in a new
// network namespace.
func nativeIPVS() bool {
	if os.Geteuid() != 0 {
		return false
	}
	// Only in the initial user namespace, the first range has all IDs.
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil || strings.Join(strings.Fields(string(ids)), " ") != "0 0 4294967295" {
		return false
	}
	// The request makes the kernel load the module.
	_, err = netlink.GenlFamilyGet("IPVS")
	return err == nil
}

// grace is the time between the deadlines of the started process and of this test.
const grace = 10 * time.Second

// arguments returns the command line for the one test, with the given timeout.
func arguments(tb testing.TB, timeout time.Duration, subtests string) []string {
	name := regexp.QuoteMeta(tb.Name())
	args := []string{"-test.v=true"}
	selected := func(value string) string {
		// Keep the user's selection of subtests, after the first slash.
		if _, sub, ok := strings.Cut(value, "/"); ok {
			return "^" + name + "$/" + sub
		}
		if subtests != "" {
			return "^" + name + "$/" + subtests
		}
		return "^" + name + "$"
	}
	// Tests that wait run in parallel, but not so many that they wait for the emulated
	// processors.
	args = append(args, "-test.parallel=4")
	run, bench := "", ""
	for i := 1; i < len(os.Args); i++ {
		name, value, given := strings.Cut(strings.TrimPrefix(os.Args[i], "-"), "=")
		name = strings.TrimPrefix(name, "-")
		switch name {
		case "test.run":
			run = value
		case "test.bench":
			bench = value
		case "test.v", "test.timeout", "test.testlogfile", "test.paniconexit0", "test.count", "test.gocoverdir", "test.coverprofile",
			"test.cpuprofile", "test.memprofile", "test.outputdir", "test.fuzzcachedir":
		default:
			if given && strings.HasPrefix(name, "test.") {
				args = append(args, os.Args[i])
			}
		}
	}
	if _, ok := tb.(*testing.B); ok {
		args = append(args, "-test.run=^$", "-test.bench="+selected(bench))
	} else {
		args = append(args, "-test.run="+selected(run))
	}
	// The test's own flags.
	flag.Visit(func(f *flag.Flag) {
		if !strings.HasPrefix(f.Name, "test.") {
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	return append(args, "-test.timeout="+timeout.String())
}

// remaining returns how long the started process may take.
func remaining(tb testing.TB) time.Duration {
	if t, ok := tb.(*testing.T); ok {
		if deadline, ok := t.Deadline(); ok {
			return max(time.Until(deadline)-2*grace, grace)
		}
	}
	return time.Hour
}

// environment returns the environment of the started test.
func environment() []string {
	env := []string{insideEnv + "=1", netlab.InsideEnv + "=1", "HOME=/root"}
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if strings.HasPrefix(name, "PROXIER_") && name != insideEnv && name != kernelEnv || name == "GORACE" || name == "GOMAXPROCS" {
			env = append(env, e)
		}
	}
	return env
}

// native runs the test in a new network namespace of the running kernel.
func native(tb testing.TB, subtests string) *command {
	cmd := exec.CommandContext(tb.Context(), "/proc/self/exe")
	cmd.Args = append(os.Args[:1:1], arguments(tb, remaining(tb), subtests)...)
	cmd.Env = append(os.Environ(), environment()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	return &command{cmd, 0, func() (int, error) { return cmd.ProcessState.ExitCode(), nil }}
}

// run waits for the command and gives tb the result of its test. It reports false if the
// command did not start the test in time.
func (c *command) run(tb testing.TB) bool {
	tb.Helper()
	// Keep the thread that starts the process, because the process dies with it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	lines, started, err := c.start()
	if err != nil {
		tb.Fatalf("vm: %v", err)
	}
	result, text, err := follow(tb, lines)
	werr := c.Wait()
	code, serr := c.status()
	switch {
	case !started:
		tb.Logf("the machine did not start the test within %v: %v", c.startTimeout, serr)
		return false
	case serr != nil:
		tb.Fatalf("%s%v", text, errors.Join(serr, werr, err))
	case code != 0:
		tb.Fatalf("%sexit status %d", text, code)
	case result == "SKIP":
		tb.Skipf("%s", text)
	case result == "" && isBenchmark(tb):
		tb.Skip("-bench selects none of its sub-benchmarks")
	case result != "PASS":
		tb.Fatalf("%sthe process succeeded but did not run the test", text)
	}
	if isBenchmark(tb) {
		tb.Skip("the results are above")
	}
	return true
}

func isBenchmark(tb testing.TB) bool {
	_, ok := tb.(*testing.B)
	return ok
}

// follow reads the output of a test and returns the test's result: PASS, FAIL, SKIP, or "".
// With -v it shows output as it comes; otherwise it returns the output. It always shows
// results of benchmarks.
func follow(tb testing.TB, lines *bufio.Reader) (result, text string, err error) {
	_, bench := tb.(*testing.B)
	var kept strings.Builder
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			for _, end := range []string{"PASS", "FAIL", "SKIP"} {
				if strings.HasPrefix(line, "--- "+end+": "+tb.Name()+" ") {
					result = end
				}
			}
			switch {
			case bench:
				if strings.HasPrefix(line, "Benchmark") && len(strings.Fields(line)) > 2 {
					result = "PASS"
					fmt.Print(line)
				} else {
					kept.WriteString(line)
				}
			case testing.Verbose():
				io.WriteString(tb.Output(), line)
			default:
				kept.WriteString(line)
			}
		}
		if err == io.EOF {
			return result, kept.String(), nil
		}
		if err != nil {
			return result, kept.String(), err
		}
	}
}
