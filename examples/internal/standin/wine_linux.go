package standin

import (
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

//go:embed dll/hns.c
var hns string

//go:embed dll/bcryptprimitives.c
var bcryptPrimitives string

// dlls holds the source of each DLL.
var dlls = map[string]string{"computenetwork": hns, "vmcompute": hns, "bcryptprimitives": bcryptPrimitives}

// compiler is the C compiler for Windows, of Debian's package gcc-mingw-w64-x86-64.
const compiler = "x86_64-w64-mingw32-gcc"

// Wine is Wine with the DLLs.
type Wine struct{ wine, prefix string }

// Start returns Wine with the DLLs. It makes the prefix once, below the user's cache folder, which
// takes about a minute. Programs in Wine take minutes, so it skips the test unless long forms
// run ([testtime.NeedThorough]). Without Wine or the compiler it also skips the test, as [netlab.Need] does.
func Start(tb testing.TB) *Wine {
	tb.Helper()
	testtime.NeedThorough(tb)
	w, err := Find()
	netlab.Need(tb, !errors.Is(err, errMissing), fmt.Sprint(err))
	if err != nil {
		tb.Fatal(err)
	}
	return w
}

// errMissing means that a program is missing.
var errMissing = errors.New("Wine")

// Find is like Start, without a test.
func Find() (*Wine, error) {
	for _, name := range []string{"wine64", "/usr/lib/wine/wine64"} {
		if path, err := exec.LookPath(name); err == nil {
			if _, err := exec.LookPath(compiler); err != nil {
				return nil, fmt.Errorf("%w's compiler %s", errMissing, compiler)
			}
			return makePrefix(path)
		}
	}
	return nil, errMissing
}

// Clone returns Wine with another prefix, which the caller must Remove. Each prefix has a server
// process, which makes the sockets of all programs, in the network namespace of the first one.
func (w *Wine) Clone() (*Wine, error) {
	dir, err := os.MkdirTemp(filepath.Dir(w.prefix), "clone-")
	if err != nil {
		return nil, err
	}
	out := &Wine{w.wine, dir}
	// The registry is written in place, everything else is not written.
	err = run(exec.Command("sh", "-c", `cp -alT "$0" "$1" && cp --remove-destination "$0"/*.reg "$1"`, w.prefix, dir))
	if err != nil {
		out.Remove()
		return nil, fmt.Errorf("cannot copy the Wine prefix: %w", err)
	}
	return out, nil
}

// Remove ends the programs of a prefix that Clone made, and deletes it.
func (w *Wine) Remove() {
	w.Stop()
	os.RemoveAll(w.prefix)
}

// Stop ends all programs of the prefix.
func (w *Wine) Stop() {
	server := w.Command("")
	server.Path, server.Args = filepath.Join(filepath.Dir(w.wine), "wineserver"), []string{"wineserver", "-k"}
	_ = run(server) // it fails if none runs
}

// makePrefix makes the prefix for these sources, unless it exists.
func makePrefix(wine string) (*Wine, error) {
	hash := sha256.Sum256([]byte(bcryptPrimitives + hns))
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	out := &Wine{wine, filepath.Join(cache, "proxier", fmt.Sprintf("wine-%x", hash[:6]))}
	if _, err := os.Stat(out.prefix); err == nil {
		return out, nil
	}
	// Another process may do the same: the last step is a rename.
	if err := os.MkdirAll(filepath.Dir(out.prefix), 0o755); err != nil {
		return nil, err
	}
	w := &Wine{wine: wine}
	if w.prefix, err = os.MkdirTemp(filepath.Dir(out.prefix), "wine-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(w.prefix)
	if err := run(w.Command("wineboot", "-i")); err != nil {
		return nil, fmt.Errorf("cannot make a Wine prefix: %w", err)
	}
	for dll, source := range dlls {
		// Without -static-libgcc a DLL may need libgcc_s_seh-1.dll.
		c := exec.Command(compiler, "-O2", "-Wall", "-Werror", "-shared", "-static-libgcc", "-s",
			"-o", filepath.Join(w.prefix, "drive_c/windows/system32", dll+".dll"), "-xc", "-", "-lole32", "-ladvapi32", "-lws2_32")
		c.Stdin = strings.NewReader(source)
		if err := run(c); err != nil {
			return nil, fmt.Errorf("cannot compile %s.dll: %w", dll, err)
		}
	}
	w.Stop()
	if err := os.Rename(w.prefix, out.prefix); err != nil {
		if _, exists := os.Stat(out.prefix); exists != nil {
			return nil, err
		}
	}
	return out, nil
}

// run runs a command whose output matters only if it fails.
func run(c *exec.Cmd) error {
	if text, err := output(c); err != nil {
		return fmt.Errorf("%w: %.2000s", err, text)
	}
	return nil
}

// output runs a command and returns what it prints. The output goes through a file: services that
// Wine starts inherit it, and would keep a pipe open.
func output(c *exec.Cmd) (string, error) {
	f, err := os.CreateTemp("", "wine")
	if err != nil {
		return "", err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	c.Stdout, c.Stderr = f, f
	err = c.Run()
	text, readErr := os.ReadFile(f.Name())
	return strings.ReplaceAll(string(text), "\r\n", "\n"), errors.Join(err, readErr)
}

// Command returns the command that runs a Windows program. Its output must go to files, because
// services that Wine starts inherit it and keep a pipe open. Drive Z has the files of this system.
func (w *Wine) Command(program string, args ...string) *exec.Cmd {
	c := exec.Command(w.wine, append([]string{program}, args...)...)
	c.Env = append(os.Environ(), "WINEPREFIX="+w.prefix, "WINEARCH=win64", "WINEDEBUG=-all", "DISPLAY=")
	return c
}

// Test builds the test binary of the package in the working folder as a Windows program, runs it
// with -test.v and args, and fails the test if it fails. It logs the last lines of what the program
// prints outside of tests.
func (w *Wine) Test(tb testing.TB, args ...string) {
	tb.Helper()
	exe := filepath.Join(tb.TempDir(), "test.exe")
	build := exec.Command("go", "test", "-c", "-o", exe, ".")
	build.Env = append(os.Environ(), "GOOS=windows", "CGO_ENABLED=0")
	if err := run(build); err != nil {
		tb.Fatalf("cannot build the tests for Windows: %v", err)
	}
	text, err := output(w.Command(exe, append([]string{"-test.v"}, args...)...))
	passed := strings.Count(text, "\n--- PASS: ")
	if err == nil && passed != 0 {
		tb.Logf("%d tests passed", passed)
		return
	}
	// The end of each failed test is near its FAIL line.
	var failed []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, "FAIL") || strings.Contains(line, ".go:") || strings.Contains(line, "panic") {
			failed = append(failed, line)
		}
	}
	tb.Errorf("%v, %d tests passed:\n%s", err, passed, strings.Join(failed[max(0, len(failed)-60):], ""))
}
