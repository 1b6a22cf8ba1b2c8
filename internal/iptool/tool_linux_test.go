package iptool

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) {
	confine.Roles{"restore": restoreForever}.Enter()
	netlab.Main(m)
}

// script returns the path of a shell script that replaces a tool.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tool")
	must.Do(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755))
	return path
}

// find returns a Tool whose restore and save are a script that prints a version or
// executes text.
func find(t *testing.T, text string) *Tool {
	t.Helper()
	path := script(t, "if [ \"$1\" = --version ]; then echo 'iptables v1.8.9 (nf_tables)'; exit; fi\n"+text)
	tool := must.Get(Find(t.Context(), Config{Family: tracker.IPv4, Restore: path, Save: path, Namespace: netlab.NewHost(t).Namespace(), Timeout: time.Minute}))(t)
	return tool
}

func TestRulesAreRestoredAndSaved(t *testing.T) {
	for _, flavor := range []string{"nft", "legacy"} {
		for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			c := Config{Family: family, Flavor: flavor, Namespace: netlab.NewHost(t).Namespace(), LockFile: filepath.Join(t.TempDir(), "lock")}
			tool, err := Find(t.Context(), c)
			netlab.Need(t, !errors.Is(err, ErrUnsupported), "iptables-"+flavor)
			if err != nil {
				t.Fatal(err)
			}
			if tool.NFT() != (flavor == "nft") {
				t.Errorf("%s: NFT is %v", flavor, tool.NFT())
			}
			must.Do(t, tool.Restore(t.Context(), []byte("*nat\n:TRIED - [0:0]\nCOMMIT\n")))
			var out bytes.Buffer
			if err := tool.Save(t.Context(), "nat", &out); err != nil || !strings.Contains(out.String(), ":TRIED") {
				t.Errorf("saved %q, error %v", out.String(), err)
			}
			err = tool.Restore(t.Context(), []byte("*nat\n-A TRIED -p tcp\n-A TRIED --nonsense\nCOMMIT\n"))
			var refused *Error
			if !errors.As(err, &refused) || refused.Line != 3 || !strings.Contains(refused.Text, "--nonsense") || refused.Killed() || refused.TooLarge() {
				t.Errorf("%s: %v", flavor, err)
			}
		}
	}
}

// TestTablesThatCannotBePrintedAreReported adds rules with nft to a table that has rules of iptables.
// Save must report each rule for which it leaves out the others, and ReadContents must find those.
func TestTablesThatCannotBePrintedAreReported(t *testing.T) {
	for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		h := netlab.NewHost(t)
		tool, err := Find(t.Context(), Config{Family: family, Flavor: "nft", Namespace: h.Namespace()})
		netlab.Need(t, !errors.Is(err, ErrUnsupported), "iptables-nft")
		if err != nil {
			t.Fatal(err)
		}
		table := map[tracker.Family]string{tracker.IPv4: "ip nat", tracker.IPv6: "ip6 nat"}[family]
		const rule = `OUTPUT -p tcp -m comment --comment "to X" -j X`
		must.Do(t, tool.Restore(t.Context(), []byte("*nat\n:X - [0:0]\n-A "+rule+"\n-A X -j RETURN\nCOMMIT\n")))
		for native, foreign := range map[string]string{
			"tcp dport 80 redirect to :8080":        "other",
			"ct state new accept":                   "other",
			"meta l4proto tcp meta mark set 4":      "other",
			"limit rate 3 bytes/second accept":      "",
			"tcp dport 80 accept comment \"plain\"": "readable",
		} {
			must.Get(h.Run(t, "nft", "add chain "+table+" other; add rule "+table+" other "+native))(t)
			for _, name := range []string{"nat", ""} {
				var out bytes.Buffer
				err := tool.Save(t.Context(), name, &out)
				if readable := err == nil && strings.Contains(out.String(), rule); readable != (foreign == "readable") || !readable && !errors.Is(err, ErrUnreadable) {
					t.Errorf("%v %s: error %v, saved\n%s", family, native, err, out.String())
				}
			}
			c, err := tool.ReadContents(t.Context(), "nat")
			if err != nil || c.Foreign != strings.TrimPrefix(foreign, "readable") {
				t.Errorf("%v %s: chain %q, error %v", family, native, c.Foreign, err)
			}
			known := []string{rule, "INPUT -j X", "X -j RETURN"}
			text := c.Text("nat", known, func(in []byte) error { return tool.Restore(t.Context(), in) })
			for _, want := range []string{"*nat\n", ":OUTPUT", ":X", ":other", "-A " + rule + "\n", "COMMIT\n"} {
				if !strings.Contains(text, want) || strings.Contains(text, "INPUT -j") || strings.Count(text, "-A ") != 1 {
					t.Errorf("%v %s: no %q in\n%s", family, native, want, text)
				}
			}
			must.Get(h.Run(t, "nft", "flush chain "+table+" other; delete chain "+table+" other"))(t)
		}
	}
	for _, text := range []string{"*nat\\n:A - [0:0]\\n", "*nat\\nCOMMIT\\n*filter"} {
		if err := find(t, "printf '"+text+"'").Save(t.Context(), "", io.Discard); !errors.Is(err, errIncomplete) {
			t.Errorf("output %q: error %v", text, err)
		}
	}
}

func TestToolErrorsAreRecognized(t *testing.T) {
	run := func(text string) *Error {
		t.Helper()
		var e *Error
		if err := find(t, text).Restore(t.Context(), []byte("one\ntwo\n")); !errors.As(err, &e) {
			t.Fatalf("%s: %v", text, err)
		}
		return e
	}
	if e := run("echo 'line 2 failed' >&2; exit 3"); e.Status != 3 || e.Line != 2 || e.Text != "two" || !strings.HasSuffix(e.Error(), "exit status 3: line 2 failed (line 2: two)") {
		t.Errorf("%v", e)
	}
	if e := run("echo 'Another app is currently holding the xtables lock.' >&2; exit 4"); !errors.Is(e, ErrLocked) {
		t.Errorf("%v is not ErrLocked", e)
	}
	if e := run("kill -9 $$"); !e.Killed() {
		t.Errorf("%v: not reported as killed", e)
	}
	if e := run("echo 'sendmsg() failed: Message too long' >&2; exit 1"); !e.TooLarge() {
		t.Errorf("%v: not reported as too large", e)
	}
	generation := "echo 'iptables-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: "
	for text, want := range map[string]bool{"Memory allocation problem": true, "No buffer space available": true, "Permission denied (you must be root)": false} {
		if e := run(generation + text + "' >&2; exit 4"); e.Temporary() != want {
			t.Errorf("%v: temporary is %v", e, !want)
		}
	}
	if e := run("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1"); len(e.Message) != maxMessage {
		t.Errorf("a message of %d bytes", len(e.Message))
	}
	err := find(t, "exec sleep 60").WithTimeout(50*time.Millisecond).Restore(t.Context(), nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a tool that hangs: %v", err)
	}
	// The tool gets the complete input, and options after its other arguments.
	if err := find(t, `[ "$*" = "--noflush --test" ] && [ "$(cat)" = "input" ]`).Restore(t.Context(), []byte("input"), "--test"); err != nil {
		t.Error(err)
	}
}

func TestUnsupportedToolsAreReported(t *testing.T) {
	ns := netlab.NewHost(t).Namespace()
	for name, path := range map[string]string{
		"missing":    "/nowhere/iptables-restore",
		"too old":    script(t, "echo iptables v1.6.1"),
		"no version": script(t, "echo hello"),
	} {
		if _, err := Find(t.Context(), Config{Family: tracker.IPv4, Restore: path, Save: path, Namespace: ns}); !errors.Is(err, ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Find(t.Context(), Config{Family: tracker.IPv4, Restore: script(t, "exit 1"), Save: "true", Namespace: ns}); err == nil || errors.Is(err, ErrUnsupported) {
		t.Errorf("a tool that fails: %v", err)
	}
}

func TestToolNamesFollowFromConfig(t *testing.T) {
	for want, c := range map[string]Config{
		"iptables-save":         {Family: tracker.IPv4},
		"ip6tables-legacy-save": {Family: tracker.IPv6, Flavor: "legacy"},
		"iptables-nft-save":     {Family: tracker.IPv4, Flavor: "nft"},
	} {
		if got := c.name("save"); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestLineIsFoundInMessage(t *testing.T) {
	for message, want := range map[string]int{
		"iptables-restore: line 12 failed":                          12,
		"x\nError occurred at line: 5\nTry":                         5,
		"v1.8.9 (nf_tables): \nline 4: RULE_APPEND failed (Invalid": 4,
		"no idea": 0,
	} {
		if got := failedLine(message); got != want {
			t.Errorf("%q: %d, want %d", message, got, want)
		}
	}
}

func TestVersionIsParsed(t *testing.T) {
	for text, want := range map[string]string{
		"iptables-restore v1.8.9 (nf_tables)": "10809 true true",
		"iptables-restore v1.8.9 (legacy)":    "10809 false true",
		"iptables-restore v1.6.2":             "10602 false true",
		"iptables-restore v1.10":              "10a00 false true",
		"BusyBox":                             "0 false false",
	} {
		version, nft, ok := parseVersion([]byte(text))
		if got := fmt.Sprintf("%x %v %v", version, nft, ok); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// TestProgramDiesWithAgent kills an agent that waits for a program. The program must die,
// too, so that it does not write after the next agent has taken over.
func TestProgramDiesWithAgent(t *testing.T) {
	netlab.Require(t)
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	must.Do(t, unix.Mkfifo(pipe, 0o600))
	// The script keeps the pipe open as long as it lives.
	script := "#!/bin/sh\n[ \"$1\" = --version ] && { echo 'iptables v1.8.9 (nf_tables)'; exit; }\nexec 3>" + pipe + "\necho $$ >&3\nexec sleep 600\n"
	for _, name := range []string{"iptables-nft-restore", "iptables-nft-save"} {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700))
	}
	// Open the pipe for both directions, so that the call does not block, and then for
	// reading alone.
	both := must.Get(os.OpenFile(pipe, os.O_RDWR, 0))(t)
	program := must.Get(os.Open(pipe))(t)
	defer program.Close()

	cmd := confine.Command("restore", confine.Limits{})
	cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	ready := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	program.SetReadDeadline(time.Now().Add(time.Minute))
	lines := bufio.NewReader(program)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatalf("the program was not started: %v", err)
	}
	pid := must.Get(strconv.Atoi(strings.TrimSpace(line)))(t)
	both.Close()
	if text, err := bufio.NewReader(ready).ReadString('\n'); text != "ready\n" {
		t.Fatalf("the agent wrote %q, %v", text, err)
	}
	must.Do(t, cmd.Process.Kill())
	program.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the program did not die: %v", err)
		unix.Kill(pid, unix.SIGKILL)
	}
}

// restoreForever is an agent that waits for a program while other threads start and end. The
// program must not die with those.
func restoreForever() error {
	ns, err := netns.Open(nil)
	if err != nil {
		return err
	}
	defer ns.Close()
	waiting, err := Find(context.Background(), Config{Family: tracker.IPv4, Flavor: "nft", Namespace: ns})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- waiting.Restore(context.Background(), nil) }()
	time.Sleep(50 * time.Millisecond)
	var threads sync.WaitGroup
	for range 20 {
		threads.Go(func() {
			// The thread ends with the goroutine.
			runtime.LockOSThread()
			time.Sleep(10 * time.Millisecond)
		})
	}
	threads.Wait()
	select {
	case err := <-done:
		return fmt.Errorf("the program has ended: %w", err)
	default:
	}
	fmt.Println("ready")
	return <-done
}
