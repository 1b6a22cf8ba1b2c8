package netlab

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// requireAllEnv makes [Require] and [Need] fail instead of skip. The project's own checks
// set it, so that no machine skips tests unnoticed.
const requireAllEnv = "PROXIER_REQUIRE_ALL"

// Main runs the tests in new user and network namespaces, by [Reexec], and exits with
// their status. Call it in TestMain. If namespaces are not available, it runs the tests in
// the present ones without examples, and tests that call [Require] are skipped.
func Main(m *testing.M) {
	inside, code, err := Reexec()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		// An example cannot skip itself.
		flag.Parse()
		if err := flag.Set("test.skip", "^Example"); err != nil {
			panic(err) // the flag exists
		}
	}
	if inside || err != nil {
		// Most tests have a small heap, which the collector would go through all the time.
		debug.SetGCPercent(400)
		code = m.Run()
	}
	os.Exit(code)
}

// Parallel makes up to n tests that call t.Parallel run at the same time, unless the flag
// -parallel is set. Call it in TestMain before [Main]. It is for tests that wait, for
// example to see that the kernel does nothing, and need hardly any processor.
func Parallel(n int) {
	const name = "test.parallel"
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	if given {
		return
	}
	if err := flag.Set(name, strconv.Itoa(n)); err != nil {
		panic(err) // the flag exists
	}
}

// Require skips the test unless it runs inside [Main] and can create namespaces. With
// PROXIER_REQUIRE_ALL=1 in the environment it fails the test instead.
func Require(tb testing.TB) {
	tb.Helper()
	if os.Getenv(InsideEnv) == "" {
		Need(tb, false, "its own network namespace (was TestMain netlab.Main, and are user namespaces allowed?)")
		return
	}
	err := hosts()
	Need(tb, err == nil, fmt.Sprintf("network namespaces: %v", err))
}

// hosts returns the error of creating a host. Some systems let anyone create user namespaces but grant no
// privileges in them.
var hosts = sync.OnceValue(func() error {
	lab := New()
	defer lab.Close()
	lab.Host("probe")
	return lab.Err
})

// Need skips the test unless ok is set, with a line that names what the test needs. With
// PROXIER_REQUIRE_ALL=1 in the environment it fails the test instead.
func Need(tb testing.TB, ok bool, what string) {
	tb.Helper()
	switch {
	case ok:
	case os.Getenv(requireAllEnv) != "":
		tb.Fatalf("needs %s (%s is set)", what, requireAllEnv)
	default:
		tb.Skipf("needs %s", what)
	}
}

// NeedPrograms skips the test, as [Need] does, unless the programs are installed. A name without
// slashes is looked up on the PATH.
func NeedPrograms(tb testing.TB, names ...string) {
	tb.Helper()
	for _, name := range names {
		_, err := exec.LookPath(name)
		Need(tb, err == nil, name)
	}
}

// Command returns a command that runs a program. It skips the test as [NeedPrograms] does, so it
// must be called from the test's goroutine. Tests run every program that a machine may lack by
// Command or [Host.Run].
func Command(tb testing.TB, name string, args ...string) *exec.Cmd {
	tb.Helper()
	NeedPrograms(tb, name)
	return exec.Command(name, args...)
}

// Run runs a program inside the namespace and returns its standard output, as [Host.Output] does.
// It skips the test as [Command] does.
func (h *Host) Run(tb testing.TB, name string, args ...string) (string, error) {
	tb.Helper()
	NeedPrograms(tb, name)
	return h.Output(name, args...)
}

// NewHost returns a host in a lab of its own, which ends with the test. It skips the test
// as [Require] does.
func NewHost(tb testing.TB) *Host {
	tb.Helper()
	_, hosts := NewHosts(tb, "node")
	return hosts["node"]
}

// NewHosts returns a lab, which ends with the test, and its hosts by their names. It skips the
// test as [Require] does.
func NewHosts(tb testing.TB, names ...string) (*Lab, map[string]*Host) {
	tb.Helper()
	Require(tb)
	lab, hosts := New(), map[string]*Host{}
	lab.tb = tb
	tb.Cleanup(func() { lab.Close() })
	for _, name := range names {
		hosts[name] = lab.Host(name)
	}
	return lab, hosts
}

// ServeTCP accepts TCP connections at the address, which must be literal, until the
// test ends. It calls handle for each on a goroutine of its own and closes the
// connection when handle returns.
func (h *Host) ServeTCP(tb testing.TB, addr string, handle func(net.Conn)) {
	tb.Helper()
	l, err := h.Listen("tcp", addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	go Serve(l, handle)
}

// ServeUDP answers every datagram at the address, which must be literal, with the
// text until the test ends.
func (h *Host) ServeUDP(tb testing.TB, addr, text string) {
	tb.Helper()
	l, err := h.ListenPacket("udp", addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	// Thousands of clients may ask at the same moment. Outside of the initial user namespace
	// the buffer keeps its default size.
	if raw, err := l.(*net.UDPConn).SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) })
	}
	go ServePackets(l, func(netip.AddrPort) []byte { return []byte(text) })
}

// ManyFiles opens files until a new one has a number above 1,023, which select(2) cannot
// watch. The files stay open until the test ends.
func ManyFiles(tb testing.TB) {
	tb.Helper()
	const enough = 1100
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		tb.Fatal(err)
	}
	Need(tb, limit.Max >= 2*enough, "a hard limit of 2,200 open files (ulimit -Hn)")
	for range enough {
		f, err := os.Open(os.DevNull)
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { f.Close() })
	}
}
