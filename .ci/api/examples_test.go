package api

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// laboratories are the folders of examples that are test equipment. They may import internal/testing.
var laboratories = []string{"nodeproxy/internal/lab", "nodeproxy/internal/demo", "internal/controlplane", "internal/process", "internal/standin"}

// parts are the folders of examples that are parts of nodeproxy, with the internal packages that they may import.
var parts = map[string][]string{
	"internal": append(slices.Clone(bounds), "inet", "nfnl/tuple", "nft"), "nodeproxy": append(slices.Clone(bounds), "inet", "nfnl/tuple", "nft"), "socketlb": bounds, "userspace": bounds, "winkernel": bounds,
	"reset": append(slices.Clone(bounds), "listdiff", "nfnl/tuple", "nft"),
}

var bounds = []string{"backendconf", "complaint", "fairshare", "netns", "nfnl"}

// TestExamplesImportNoInternals finds examples that a vendor could not copy.
func TestExamplesImportNoInternals(t *testing.T) {
	examples, files := filepath.Join(root, "examples"), 0
	err := filepath.WalkDir(examples, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(examples, path)
		if d.IsDir() && name == "e2e" {
			return fs.SkipDir
		}
		if d.IsDir() || err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		folder, _, _ := strings.Cut(filepath.ToSlash(name), "/")
		equipment := slices.Contains(laboratories, filepath.ToSlash(filepath.Dir(name)))
		for _, i := range f.Imports {
			p, internal := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), module+"/internal/")
			if internal && (!equipment || !strings.HasPrefix(p, "testing/")) && !slices.Contains(parts[folder], p) {
				t.Errorf("examples/%s imports internal/%s: use a public package, or the example's own lines", filepath.ToSlash(name), p)
			}
		}
		return nil
	})
	if err != nil || files < 100 {
		t.Errorf("%d files, %v", files, err)
	}
}

// TestRunUsesThePublicAgent finds imports by which the verb run of nodeproxy would do what a program that
// embeds package agent cannot.
func TestRunUsesThePublicAgent(t *testing.T) {
	var imports []string
	for _, dir := range []string{"run", "program"} {
		files, err := filepath.Glob(filepath.Join(root, "examples/nodeproxy/internal", dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatal(dir, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f := get(parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly))(t)
			for _, i := range f.Imports {
				p := strings.Trim(i.Path.Value, `"`)
				imports = append(imports, p)
				if strings.HasPrefix(p, module+"/examples/internal/") {
					t.Errorf("%s imports %s", file, p)
				}
			}
		}
	}
	if !slices.Contains(imports, module+"/examples/agent") {
		t.Error("the verb run does not use package agent")
	}
}
