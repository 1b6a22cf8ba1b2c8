package weight

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the README's table")

const (
	library = "github.com/go-proxier/proxier"
	readme  = "../../README.md"
	begin   = "<!-- made by .ci/weight -->\n"
	end     = "<!-- end -->\n"
	// tolerance is the allowed relative difference of a program's size: it depends on the
	// version of Go.
	tolerance = 0.04
)

// programs holds the folders in the order of the table. The others are compared with the
// first.
var programs = []string{"api-types", "endpointslice", "tracker", "ruleset", "runner", "runner-health", "nftables", "iptables", "ipvs", "conntrack"}

// weight describes the dependencies of one program.
type weight struct {
	// packages is the number of compiled packages outside the standard library.
	packages int
	// modules holds the modules of these packages, without this one.
	modules []string
	// adds holds the modules that the API types do not need, without the library.
	adds []string
	// size is the size of the stripped program in bytes.
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

// TestDependenciesAreThoseInTheREADME also checks that some packages add no modules.
func TestDependenciesAreThoseInTheREADME(t *testing.T) {
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
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(text), begin)
	written, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("no table in %s", readme)
	}
	if *update {
		if err := os.WriteFile(readme, []byte(before+begin+table+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if why := differ(written, table); why != "" {
		t.Errorf("%s\nREADME:\n%s\nnow:\n%s\nif the change is intended, run in .ci/weight: go test . -update", why, written, table)
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

// differ returns a description of the first relevant difference of two tables, or "".
func differ(a, b string) string {
	x, y := bufio.NewScanner(strings.NewReader(a)), bufio.NewScanner(strings.NewReader(b))
	for {
		more, moreB := x.Scan(), y.Scan()
		if more != moreB {
			return "the number of lines changed"
		}
		if !more {
			return ""
		}
		p, q := strings.Split(x.Text(), " | "), strings.Split(y.Text(), " | ")
		if x.Text() == y.Text() {
			continue
		}
		last := len(p) - 1
		if len(p) != len(q) || !slices.Equal(p[:last], q[:last]) {
			return fmt.Sprintf("%q is now %q", x.Text(), y.Text())
		}
		was, err1 := strconv.ParseFloat(strings.TrimSuffix(p[last], " |"), 64)
		is, err2 := strconv.ParseFloat(strings.TrimSuffix(q[last], " |"), 64)
		if cmp.Or(err1, err2) != nil || math.Abs(is-was) > tolerance*was {
			return fmt.Sprintf("%q is now %q", x.Text(), y.Text())
		}
	}
}

func TestDifferToleratesSizesAlone(t *testing.T) {
	const table = "| a | b |\n|---|---|\n| `x` | 3 | none | 9.0 |\n"
	for other, same := range map[string]bool{
		table:                                   true,
		strings.Replace(table, "9.0", "9.3", 1): true,
		strings.Replace(table, "9.0", "9.5", 1): false,
		strings.Replace(table, "3", "4", 1):     false,
		strings.Replace(table, "none", "m", 1):  false,
		table + "| y |\n":                       false,
	} {
		if got := differ(table, other); (got == "") != same {
			t.Errorf("%q: %q", other, got)
		}
	}
}
