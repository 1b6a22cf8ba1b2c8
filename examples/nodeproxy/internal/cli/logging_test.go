package cli

import (
	"bufio"
	"encoding/json"
	"log/slog"
	"os"
	"strings"
	"testing"

	logsjson "k8s.io/component-base/logs/json"
	"k8s.io/klog/v2/textlogger"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestVModuleMatchesTheCallersFile checks that --vmodule does not match files of slog or logr.
func TestVModuleMatchesTheCallersFile(t *testing.T) {
	for pattern, want := range map[string]string{
		"logging_test=4":             "debug,info,",
		"logging_test=3":             "info,",
		"logger=4,sloghandler=4":     "info,",
		"handler=4,logr=4,logging=4": "info,",
	} {
		var diag strings.Builder
		c := textlogger.NewConfig(textlogger.Output(&diag))
		must.Do(t, c.VModule().Set(pattern))
		log := inFront(textlogger.NewLogger(c), textDepth).With("with", 1).WithGroup("group")
		log.Debug("debug")
		log.InfoContext(t.Context(), "info")
		got := ""
		for line := range strings.Lines(diag.String()) {
			if !strings.Contains(line, " logging_test.go:") {
				t.Errorf("the line names another file: %s", line)
			}
			_, message, _ := strings.Cut(line, `] "`)
			message, _, _ = strings.Cut(message, `"`)
			got += message + ","
		}
		if got != want {
			t.Errorf("--vmodule=%s: logged %s want %s", pattern, got, want)
		}
	}
}

// TestVerbositySelectsLevels checks which levels are logged at each verbosity, and how.
func TestVerbositySelectsLevels(t *testing.T) {
	for _, tt := range []struct {
		v           string
		plain, calm string
	}{
		{"0", "IWE", "WE"},
		{"3", "IWE", "IWE"},
		{"4", "IIWE", "IIWE"},
	} {
		c := configtest.Parsed(t, []string{"run", "-v", tt.v})
		letters := func(wrap func(*slog.Logger) *slog.Logger) (out string) {
			var diag strings.Builder
			log := wrap(OwnLogger(c, &diag))
			for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
				log.Log(t.Context(), level, "message")
			}
			for line := range strings.Lines(diag.String()) {
				out += line[:1]
			}
			return out
		}
		if got := letters(func(l *slog.Logger) *slog.Logger { return l }); got != tt.plain {
			t.Errorf("-v %s: %s, want %s", tt.v, got, tt.plain)
		}
		if got := letters(func(l *slog.Logger) *slog.Logger { return Quiet(c, l).With("a", 1).WithGroup("g") }); got != tt.calm {
			t.Errorf("-v %s, quiet: %s, want %s", tt.v, got, tt.calm)
		}
	}
}

// TestJSONNeedsNoDeepStack logs from a goroutine whose stack has only the logger's frames.
func TestJSONNeedsNoDeepStack(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr := os.Stderr
	os.Stderr = w // the logger reports its own errors there
	l, _ := logsjson.NewJSONLogger(0, w, nil, nil)
	os.Stderr = stderr
	log := inFront(l, 0)
	go log.Info("first")
	go slog.NewLogLogger(log.Handler(), slog.LevelInfo).Print("second")
	var lines []string
	for in := bufio.NewScanner(r); len(lines) < 2 && in.Scan(); {
		lines = append(lines, in.Text())
		if !json.Valid(in.Bytes()) {
			t.Errorf("not JSON: %s", in.Text())
		}
	}
	if all := strings.Join(lines, "\n"); !strings.Contains(all, `"msg":"first"`) || !strings.Contains(all, `"msg":"second"`) {
		t.Errorf("logged:\n%s", all)
	}
}
