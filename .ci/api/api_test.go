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

var update = flag.Bool("update", false, "write api.txt anew")

const root = "../.."

func load(t *testing.T) []Package {
	t.Helper()
	pkgs, err := Load(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(pkgs) < 6 {
		t.Fatalf("only %d packages", len(pkgs))
	}
	return pkgs
}

// TestSnapshot compares the API with what is noted.
func TestSnapshot(t *testing.T) {
	now := Snapshot(load(t))
	if *update {
		if err := os.WriteFile("api.txt", []byte(strings.Join(now, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile("api.txt")
	if err != nil {
		t.Fatal(err)
	}
	noted := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, l := range now {
		if !slices.Contains(noted, l) {
			t.Errorf("+ %s", l)
		}
	}
	for _, l := range noted {
		if !slices.Contains(now, l) {
			t.Errorf("- %s", l)
		}
	}
	if t.Failed() {
		t.Log("if that is meant: go test . -update, in .ci/api")
	}
}

// TestRelease: what the last release had without a word of its going is still
// there.
func TestRelease(t *testing.T) {
	tag, err := exec.Command("git", "-C", root, "describe", "--tags", "--abbrev=0", "--match", "v*").Output()
	if err != nil {
		t.Skip("there is no release yet")
	}
	name := strings.TrimSpace(string(tag))
	before, err := exec.Command("git", "-C", root, "show", name+":.ci/api/api.txt").Output()
	if err != nil {
		t.Skipf("%s has no api.txt", name)
	}
	for _, l := range Broken(strings.Split(string(before), "\n"), Snapshot(load(t))) {
		t.Errorf("%s had, and had not deprecated: %s", name, l)
	}
}

func TestBroken(t *testing.T) {
	before := []string{
		"pkg p, func Gone()", "pkg p, func Kept()", "pkg p, func Changed(int)", "pkg p, func Old() // deprecated", "pkg p, func Aging()", "",
	}
	after := []string{"pkg p, func Aging() // deprecated", "pkg p, func Changed(string)", "pkg p, func Kept()", "pkg p, func New()"}
	got := Broken(before, after)
	if want := []string{"pkg p, func Gone()", "pkg p, func Changed(int)"}; !slices.Equal(got, want) {
		t.Errorf("broken %q, want %q", got, want)
	}
}

// TestDocs: everything exported is documented.
func TestDocs(t *testing.T) {
	for _, p := range load(t) {
		for _, missing := range Undocumented(p) {
			t.Error(missing)
		}
	}
}

// TestUndocumented tries the checks on a package that fails them all.
func TestUndocumented(t *testing.T) {
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
	f, err := parser.ParseFile(fset, "p.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	p := Package{Name: "p", Fset: fset}
	p.Files = append(p.Files, f)
	got := strings.Join(Undocumented(p), "\n")
	want := strings.Join([]string{
		"p.go:1:1: package p has no documentation",
		"p.go:3:6: p.NoDoc has no doc comment",
		"p.go:7:2: p.Config.Bare has no doc comment",
		"p.go:9:2: the doc comment of p.Config.Vague does not say what its zero value means",
		"p.go:18:2: p.Config.One2 has no doc comment",
		"p.go:22:6: the doc comment of p.T does not say who may use it at a time",
		"p.go:25:1: the doc comment of p.T.Do says nothing of errors",
	}, "\n")
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	if d := Deprecated(p); len(d) != 1 || !d["Old"] {
		t.Errorf("deprecated %v", d)
	}
}
