package weight

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the table in MEASUREMENTS.md")

const (
	library = "github.com/go-proxier/proxier"
	page    = "../../examples/e2e/MEASUREMENTS.md"
	begin   = "<!-- made by .ci/weight -->\n"
	end     = "<!-- end -->\n"
)

// programs are the folders, in the order of the table. The others are compared with the first.
var programs = []string{"api-types", "endpointslice", "tracker", "ruleset", "runner", "runner-health", "nftables", "iptables", "ipvs", "conntrack"}

// weight is what one program consists of.
type weight struct {
	// packages counts the packages outside the standard library.
	packages int
	// modules are the modules of these packages, without this one.
	modules []string
	// adds are the modules that the program with the API types alone does not have, without
	// the library.
	adds []string
	// size is that of the stripped program, in bytes.
	size int64
}

func goTool(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false")
	var diag bytes.Buffer
	cmd.Stderr = &diag
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %v: %v\n%s", args, err, diag.String())
	}
	return string(out)
}

func weigh(t *testing.T, program string) weight {
	t.Helper()
	var w weight
	out := goTool(t, "list", "-deps", "-f", "{{if not .Standard}}{{.Module.Path}}{{end}}", "./"+program)
	for line := range strings.Lines(out) {
		m := strings.TrimSpace(line)
		if m == "" || strings.HasPrefix(m, "proxier.example/") {
			continue
		}
		w.packages++
		if !slices.Contains(w.modules, m) {
			w.modules = append(w.modules, m)
		}
	}
	file := filepath.Join(t.TempDir(), program)
	goTool(t, "build", "-trimpath", "-ldflags=-s -w", "-o", file, "./"+program)
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	w.size = info.Size()
	return w
}

// TestWeight compares the packages and modules of each program with the table, and checks
// that packages outside the data planes add no module.
func TestWeight(t *testing.T) {
	weights := map[string]weight{}
	for _, p := range programs {
		w := weigh(t, p)
		for _, m := range w.modules {
			if m != library && !slices.Contains(weights["api-types"].modules, m) && p != "api-types" {
				w.adds = append(w.adds, m)
			}
		}
		slices.Sort(w.adds)
		weights[p] = w
	}
	for _, p := range []string{"endpointslice", "tracker", "ruleset", "runner", "runner-health"} {
		if adds := weights[p].adds; len(adds) != 0 {
			t.Errorf("%s adds the modules %v", p, adds)
		}
	}
	table := render(weights)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(text), begin)
	written, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("no table in %s", page)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+table+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if why := differ(written, table); why != "" {
		t.Errorf("%s\nrecorded:\n%s\nnow:\n%s\nif this is intended: go test . -update, in .ci/weight", why, written, table)
	}
}

func render(weights map[string]weight) string {
	var b strings.Builder
	fmt.Fprintln(&b, "| a program with | packages | modules | more than the API types bring | stripped, MB |")
	fmt.Fprintln(&b, "|---|---|---|---|---|")
	for _, p := range programs {
		w := weights[p]
		name, adds := "`"+strings.ReplaceAll(p, "-", "/")+"`", "none"
		if p == "api-types" {
			name, adds = "the API types alone", ""
		}
		if len(w.adds) != 0 {
			adds = strings.Join(w.adds, ", ")
		}
		fmt.Fprintf(&b, "| %s | %d | %d | %s | %.1f |\n", name, w.packages, len(w.modules), adds, float64(w.size)/1e6)
	}
	return b.String()
}

// differ describes the first difference between two tables. It ignores the last column, the sizes
// of programs, and returns "" for equal tables.
func differ(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	if len(x) != len(y) {
		return fmt.Sprintf("%d lines, now %d", len(x), len(y))
	}
	exact := func(line string) string { return line[:max(0, strings.LastIndex(line, " | "))] }
	for i := range x {
		if exact(x[i]) != exact(y[i]) {
			return fmt.Sprintf("%q is now %q", x[i], y[i])
		}
	}
	return ""
}

func TestDiffer(t *testing.T) {
	const table = "| a | b |\n|---|---|\n| `x` | 3 | none | 9.0 |\n"
	for other, same := range map[string]bool{
		table:                                   true,
		strings.Replace(table, "9.0", "8.1", 1): true,
		strings.Replace(table, "3", "4", 1):     false,
		strings.Replace(table, "none", "m", 1):  false,
		table + "| y |\n":                       false,
	} {
		if got := differ(table, other); (got == "") != same {
			t.Errorf("%q: %q", other, got)
		}
	}
}
