package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// everywhere lists the programs that tests may call without a check: those of any system with Go,
// and those that a test calls only in an emulated machine (insmod, rmmod) or on Windows (wevtutil).
var everywhere = []string{"/proc/self/exe", "cat", "env", "go", "insmod", "rmmod", "sh", "sleep", "stat", "test", "wevtutil"}

// TestTestsCheckForPrograms finds calls of programs in tests that fail, instead of skipping, where
// the program is missing.
func TestTestsCheckForPrograms(t *testing.T) {
	files := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			_, err := os.Stat(filepath.Join(path, "go.mod"))
			if err == nil && !slices.Contains([]string{root, filepath.Join(root, "examples"), filepath.Join(root, "examples/e2e")}, path) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, call := range unchecked(t, path, string(text)) {
			t.Errorf("%s: use netlab.Command or Host.Run, which skip the test where the program is missing", call)
		}
		return nil
	})
	if err != nil || files < 100 {
		t.Errorf("%d files, %v", files, err)
	}
}

// unchecked returns the calls of exec.Command and Host.Output with the name of a program that may
// be missing. It cannot see names in variables and in the scripts of a shell.
func unchecked(t *testing.T, path, text string) (calls []string) {
	t.Helper()
	fset := token.NewFileSet()
	f := get(parser.ParseFile(fset, path, text, parser.SkipObjectResolution))(t)
	// The backend of these tests gets a context. The tests call netlab.NeedPrograms first.
	reference := strings.HasSuffix(path, "ruleset/conformance/broken_linux_test.go")
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		fun, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		at := 0
		switch of, _ := fun.X.(*ast.Ident); {
		case of != nil && of.Name == "exec" && fun.Sel.Name == "Command", fun.Sel.Name == "Output":
		case of != nil && of.Name == "exec" && fun.Sel.Name == "CommandContext" && !reference:
			at = 1
		default:
			return true
		}
		if len(call.Args) <= at {
			return true
		}
		if lit, ok := call.Args[at].(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if name, err := strconv.Unquote(lit.Value); err != nil || !slices.Contains(everywhere, name) {
				calls = append(calls, fset.Position(call.Pos()).String()+": "+lit.Value)
			}
		}
		return true
	})
	return calls
}

func TestUncheckedFindsCalls(t *testing.T) {
	const text = `package p

func f() {
	exec.Command("nft", "list")
	exec.CommandContext(ctx, "conntrack")
	s.Node.Output("iptables-save")
	exec.Command("sh", "-c", "exit 3")
	exec.Command(path)
	netlab.Command(t, "nft")
	h.Run(t, "nft")
	cmd.Output()
}
`
	want := []string{`p.go:4:2: "nft"`, `p.go:5:2: "conntrack"`, `p.go:6:2: "iptables-save"`}
	if got := unchecked(t, "p.go", text); !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}
