package api

import (
	"flag"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite api.txt")

const root = "../.."

// get returns a value, and ends the test with an error: get(f())(t).
func get[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T { t.Helper(); do(t, err); return v }
}

// do ends the test with an error.
func do(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T) []Package {
	t.Helper()
	pkgs := get(Load(root))(t)
	if len(pkgs) < 6 {
		t.Fatalf("loaded only %d packages", len(pkgs))
	}
	return pkgs
}

func TestAPIIsRecorded(t *testing.T) {
	now := Snapshot(load(t))
	for _, l := range now {
		if strings.Contains(l, "internal/") {
			t.Errorf("other programs cannot name a type of an internal package: %s", l)
		}
	}
	if *update {
		do(t, os.WriteFile("api.txt", []byte(strings.Join(now, "\n")+"\n"), 0o644))
	}
	text := get(os.ReadFile("api.txt"))(t)
	recorded := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, l := range now {
		if !slices.Contains(recorded, l) {
			t.Errorf("+ %s", l)
		}
	}
	for _, l := range recorded {
		if !slices.Contains(now, l) {
			t.Errorf("- %s", l)
		}
	}
	if t.Failed() {
		t.Log("if the change is intended, run in .ci/api: go test . -update")
	}
}

// TestReleasedAPIStays requires that only deprecated API of the last release is removed.
func TestReleasedAPIStays(t *testing.T) {
	tag, err := exec.Command("git", "-C", root, "describe", "--tags", "--abbrev=0", "--match", "v*").Output()
	if err != nil {
		t.Skip("no release yet")
	}
	name := strings.TrimSpace(string(tag))
	before, err := exec.Command("git", "-C", root, "show", name+":.ci/api/api.txt").Output()
	if err != nil {
		t.Skipf("%s has no api.txt", name)
	}
	for _, l := range Broken(strings.Split(string(before), "\n"), Snapshot(load(t))) {
		t.Errorf("removed without a deprecation in %s: %s", name, l)
	}
}

func TestBrokenFindsRemovedAndChangedLines(t *testing.T) {
	before := []string{
		"pkg p, func Gone()", "pkg p, func Kept()", "pkg p, func Changed(int)", "pkg p, func Old() // deprecated", "pkg p, func Aging()", "",
	}
	after := []string{"pkg p, func Aging() // deprecated", "pkg p, func Changed(string)", "pkg p, func Kept()", "pkg p, func New()"}
	got := Broken(before, after)
	if want := []string{"pkg p, func Gone()", "pkg p, func Changed(int)"}; !slices.Equal(got, want) {
		t.Errorf("broken %q, want %q", got, want)
	}
}

func TestEverythingExportedIsDocumented(t *testing.T) {
	for _, p := range load(t) {
		for _, missing := range Undocumented(p) {
			t.Error(missing)
		}
	}
}

// TestUndocumentedFindsEveryOmission runs the checks on a package that fails them all.
func TestUndocumentedFindsEveryOmission(t *testing.T) {
	const source = `package p

type NoDoc int

// Config is documented.
type Config struct {
	Bare int
	// Vague is something.
	Vague int
	// Clear is something. 0 means 5.
	Clear int
	// Switch turns it on.
	Switch bool
	// One and Two are numbers, 0 for none.
	One int
	Two int

	One2 int
}

// T has state.
type T struct{ n int }

// Do does.
func (t *T) Do() error { return nil }

// Safe does, or fails.
func (t *T) Safe() error { return nil }

// Old is old.
//
// Deprecated: use New.
func Old() {}

// The values.
const (
	A = 1
	B = 2
)

func (t hidden) Exported() {}
type hidden int
`
	fset := token.NewFileSet()
	f := get(parser.ParseFile(fset, "p.go", source, parser.ParseComments))(t)
	p := Package{Name: "p", Fset: fset}
	p.Files = append(p.Files, f)
	got := strings.Join(Undocumented(p), "\n")
	want := strings.Join([]string{
		"p.go:1:1: package p has no documentation",
		"p.go:3:6: p.NoDoc has no doc comment",
		"p.go:7:2: p.Config.Bare has no doc comment",
		"p.go:9:2: the doc comment of p.Config.Vague does not document the zero value",
		"p.go:18:2: p.Config.One2 has no doc comment",
		"p.go:22:6: the doc comment of p.T does not document concurrent use",
		"p.go:25:1: the doc comment of p.T.Do does not document errors",
	}, "\n")
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	if d := Deprecated(p); len(d) != 1 || !d["Old"] {
		t.Errorf("deprecated %v", d)
	}
}
