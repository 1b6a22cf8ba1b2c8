package iptool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/confine"
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
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// find returns a Tool whose restore and save are a script that prints a version or
// executes text.
func find(t *testing.T, text string) *Tool {
	t.Helper()
	path := script(t, "if [ \"$1\" = --version ]; then echo 'iptables v1.8.9 (nf_tables)'; exit; fi\n"+text)
	tool, err := Find(t.Context(), Config{Family: tracker.IPv4, Restore: path, Save: path, Namespace: netlab.NewHost(t).Namespace(), Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
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
			if err := tool.Restore(t.Context(), []byte("*nat\n:TRIED - [0:0]\nCOMMIT\n")); err != nil {
				t.Fatal(err)
			}
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
