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
	"slices"
	"strconv"
	"strings"
	"sync"
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
// the same meaning there.
//
// Tests that run one after the other share a machine. Tests that call t.Parallel before Inside
// run in machines side by side, one for each of the host's processors. A top-level test must
// call Inside.
func Inside(tb testing.TB, kind Kind) bool {
	tb.Helper()
	if os.Getenv(insideEnv) != "" {
		return true
	}
	if strings.Contains(tb.Name(), "/") {
		tb.Fatal("vm.Inside is for top-level tests")
	}
	if kind == IPVS && nativeIPVS() {
		native(tb)
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
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	timeout := remaining(tb)
	ctx, cancel := context.WithTimeout(context.Background(), timeout+grace)
	defer cancel()
	m := machines.take(h)
	defer func() { machines.put(m) }()
	if m != nil && m.dir != dir {
		m.kill() // it lacks the testdata of this folder
		m = nil
	}
	if m == nil {
		if m, err = h.boot(ctx, []string{program}); err != nil {
			tb.Fatal(err)
		}
		m.dir = dir
	}
	if whole := flag.Lookup("test.timeout").Value.(flag.Getter).Get().(time.Duration); m.counted && whole != 0 {
		// The machine's clock is faster than the host's while it waits. ctx has the host's.
		timeout = whole
	}
	f := &follower{tb: tb}
	status, err := m.run(ctx, command(0, arguments(tb, timeout, h.parallel)), f.line)
	if err != nil {
		m = nil
	}
	f.end(status, err)
	return false
}

// machines holds the machines of this process, which end with it.
var machines pool

// pool lends machines.
type pool struct {
	mu sync.Mutex
	// idle holds machines that run no test. A nil machine can be booted.
	idle []*machine
	free sync.Cond
}

// take waits for a machine or, if none is idle and the host has a processor left, returns nil.
func (p *pool) take(h *host) *machine {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.free.L == nil {
		p.free.L = &p.mu
		p.idle = make([]*machine, min(max(1, runtime.NumCPU()/h.threads), most))
	}
	for len(p.idle) == 0 {
		p.free.Wait()
	}
	last := len(p.idle) - 1
	m := p.idle[last]
	p.idle = p.idle[:last]
	return m
}

// put returns a machine, or nil for one that has ended.
func (p *pool) put(m *machine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m == nil {
		p.idle = slices.Insert(p.idle, 0, nil)
	} else {
		p.idle = append(p.idle, m)
	}
	p.free.Signal()
}

// most is the largest number of machines of a process. Each may use 3 GiB.
const most = 4

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

// arguments returns the command line for the one test, with the given timeout and number of parallel
// tests.
func arguments(tb testing.TB, timeout time.Duration, parallel int) []string {
	name := regexp.QuoteMeta(tb.Name())
	args := []string{"-test.v=true"}
	selected := func(value string) string {
		// Keep the user's selection of subtests, after the first slash.
		if _, sub, ok := strings.Cut(value, "/"); ok {
			return "^" + name + "$/" + sub
		}
		return "^" + name + "$"
	}
	args = append(args, "-test.parallel="+strconv.Itoa(parallel))
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

// environment returns what a started test has in addition to its own environment.
func environment() []string {
	env := []string{insideEnv + "=1", netlab.InsideEnv + "=1"}
	for _, e := range os.Environ() {
		name, _, _ := strings.Cut(e, "=")
		if strings.HasPrefix(name, "PROXIER_") && name != insideEnv && name != kernelEnv || name == "GORACE" || name == "GOMAXPROCS" {
			env = append(env, e)
		}
	}
	return env
}

// command returns a command of the machine's shell that runs the program with the index.
func command(program int, args []string) string {
	words := []string{"cd /work && env"}
	for _, w := range slices.Concat(environment(), []string{testPath(program)}, args) {
		words = append(words, "'"+strings.ReplaceAll(w, "'", `'\''`)+"'")
	}
	return strings.Join(words, " ")
}

// native runs the test in a new network namespace of the running kernel.
func native(tb testing.TB) {
	tb.Helper()
	// Keep the thread that starts the process, because the process dies with it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(tb.Context(), "/proc/self/exe")
	cmd.Args = append(os.Args[:1:1], arguments(tb, remaining(tb), 4)...)
	cmd.Env = append(os.Environ(), environment()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	f := &follower{tb: tb}
	lines := bufio.NewReader(out)
	for {
		text, err := lines.ReadString('\n')
		f.line(text)
		if err != nil {
			break
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil
	}
	f.end(cmd.ProcessState.ExitCode(), err)
}

func isBenchmark(tb testing.TB) bool {
	_, ok := tb.(*testing.B)
	return ok
}

// follower reads the output of a test process and gives tb the test's result. With -v it shows
// output as it comes; otherwise it shows the output of a test that failed or skipped. It always
// shows results of benchmarks.
type follower struct {
	tb testing.TB
	// result is the test's result: PASS, FAIL, SKIP, or "".
	result string
	// kept is the output to show at the end.
	kept strings.Builder
}

// line reads a line of the output.
func (f *follower) line(line string) {
	for _, end := range []string{"PASS", "FAIL", "SKIP"} {
		if strings.HasPrefix(line, "--- "+end+": "+f.tb.Name()+" ") {
			f.result = end
		}
	}
	switch {
	case isBenchmark(f.tb):
		if strings.HasPrefix(line, "Benchmark") && len(strings.Fields(line)) > 2 {
			f.result = "PASS"
			fmt.Print(line)
		} else {
			f.kept.WriteString(line)
		}
	case testing.Verbose():
		io.WriteString(f.tb.Output(), line)
	default:
		f.kept.WriteString(line)
	}
}

// end gives tb the result of the process, which ended with the status or the error.
func (f *follower) end(status int, err error) {
	tb := f.tb
	tb.Helper()
	text := f.kept.String()
	switch {
	case err != nil:
		tb.Fatalf("%s%v", text, err)
	case status != 0:
		tb.Fatalf("%sexit status %d", text, status)
	case f.result == "SKIP":
		tb.Skipf("%s", text)
	case f.result == "" && isBenchmark(tb):
		tb.Skip("-bench selects none of its sub-benchmarks")
	case f.result != "PASS":
		tb.Fatalf("%sthe process succeeded but did not run the test", text)
	case isBenchmark(tb):
		tb.Skip("the results are above")
	}
}
