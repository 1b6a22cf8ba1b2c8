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

	"github.com/go-proxier/proxier/internal/netlab"
)

// Kind is what kind of kernel a test needs.
type Kind int

const (
	// IPVS is a kernel with IPVS and a process that may use it, which takes root in
	// the initial user namespace: the running kernel in new network namespace if it
	// will do, otherwise that of the machine.
	IPVS Kind = iota
	// Debian is the machine's kernel in any case.
	Debian
)

// insideEnv marks the process that Inside started.
const insideEnv = "PROXIER_VM_INSIDE"

// Inside reports true in a process that runs in a kernel of the kind, started by
// Inside. In any other it starts the test binary there, for this test or benchmark
// alone, waits until it has ended, makes of tb what became of it, and reports
// false. The command line's flags are passed on, the test's own too, so that -run,
// -v and -bench mean the same there.
//
// It must be called by the top-level test, before t.Parallel.
func Inside(tb testing.TB, kind Kind) bool {
	tb.Helper()
	if os.Getenv(insideEnv) != "" {
		return true
	}
	if strings.Contains(tb.Name(), "/") {
		tb.Fatal("vm.Inside is for top-level tests")
	}
	if kind == IPVS && nativeIPVS() {
		native(tb).run(tb)
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
		cmd, err := h.boot(ctx, tb.TempDir(), program, arguments(tb, timeout))
		if err != nil {
			tb.Fatal(err)
		}
		if cmd.run(tb) {
			return false
		}
	}
	tb.Fatalf("the machine did not start the test, %d times", boots)
	return false
}

// nativeIPVS reports whether IPVS can be used by a child of this process in a new
// network namespace.
func nativeIPVS() bool {
	if os.Geteuid() != 0 {
		return false
	}
	// The first range is all of them in the initial user namespace only.
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil || strings.Join(strings.Fields(string(ids)), " ") != "0 0 4294967295" {
		return false
	}
	// Asking for the family has the kernel load the module.
	_, err = netlink.GenlFamilyGet("IPVS")
	return err == nil
}

// grace is how long before the test's own deadline the started one has to end.
const grace = 10 * time.Second

// arguments returns the command line for the one test, to be run for that long.
func arguments(tb testing.TB, timeout time.Duration) []string {
	name := regexp.QuoteMeta(tb.Name())
	args := []string{"-test.v=true"}
	selected := func(value string) string {
		// Of what the user selected, the part behind the first slash is of interest.
		if _, sub, ok := strings.Cut(value, "/"); ok {
			return "^" + name + "$/" + sub
		}
		return "^" + name + "$"
	}
	// Tests that wait for something they do at the same time, but not so many that
	// the emulated processors make them wait.
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

// environment is what the started test gets to know.
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
func native(tb testing.TB) *command {
	cmd := exec.CommandContext(tb.Context(), "/proc/self/exe")
	cmd.Args = append(os.Args[:1:1], arguments(tb, remaining(tb))...)
	cmd.Env = append(os.Environ(), environment()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	return &command{cmd, 0, func() (int, error) { return cmd.ProcessState.ExitCode(), nil }}
}

// run waits for the command and makes of tb what became of the test in it. It
// reports false if the command kept silent, for which it was ended, or to its end.
func (c *command) run(tb testing.TB) bool {
	tb.Helper()
	// The process dies with the thread that starts it, which is therefore kept.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	lines, spoke, err := c.start()
	if err != nil {
		tb.Fatalf("vm: %v", err)
	}
	result, text, err := follow(tb, lines)
	werr := c.Wait()
	code, serr := c.status()
	switch {
	case !spoke:
		tb.Logf("the machine did not start the test within %v: %v", c.silence, serr)
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
		tb.Fatalf("%sit ended well, but did not run", text)
	}
	if isBenchmark(tb) {
		tb.Skip("its results are those above")
	}
	return true
}

func isBenchmark(tb testing.TB) bool {
	_, ok := tb.(*testing.B)
	return ok
}

// follow reads the output of a test and returns how the test ended: PASS, FAIL,
// SKIP, or nothing. Output is shown as it comes if it was asked for, and returned
// otherwise. Results of benchmarks are always shown.
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
