package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// Users returns a line for each exported identifier of the library: its name, and the other packages of the
// workspace in folder dir whose product files use it. Members of types count by themselves. Methods that
// satisfy an interface of the library or of errors and fmt are left out, and so is package
// conformance, whose users are tests. Packages in internal/testing count as tests.
func Users(dir string) ([]string, error) {
	work, err := filepath.Abs(filepath.Join(dir, "go.work"))
	if err != nil {
		return nil, err
	}
	packages, exports, err := listed(dir, work, "./...", "./examples/...", "./examples/e2e/...")
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	imp := exportImporter(fset, exports)
	names := map[types.Object]string{}
	users := map[string]map[string]bool{}
	for _, p := range packages {
		if !p.public() {
			continue
		}
		t, err := imp.Import(p.ImportPath)
		if err != nil {
			return nil, err
		}
		for obj, name := range members(t) {
			names[obj] = strings.TrimPrefix(p.ImportPath, module+"/") + "." + name
			users[names[obj]] = map[string]bool{}
		}
	}
	for _, p := range packages {
		if strings.Contains(p.ImportPath, "/internal/testing/") {
			continue // test equipment
		}
		used, err := p.uses(fset, imp)
		if err != nil {
			return nil, err
		}
		for obj := range used {
			if name, ok := names[obj]; ok && obj.Pkg().Path() != p.ImportPath {
				users[name][strings.TrimPrefix(p.ImportPath, module+"/")] = true
			}
		}
	}
	var out []string
	for name, by := range users {
		out = append(out, strings.TrimSpace(name+": "+strings.Join(slices.Sorted(maps.Keys(by)), " ")))
	}
	slices.Sort(out)
	return out, nil
}

// public reports whether other modules can import the package from the library, except conformance.
func (p *listedPackage) public() bool {
	for _, part := range []string{"/internal/", "/examples/", "/conformance/"} {
		if strings.Contains(p.ImportPath+"/", part) {
			return false
		}
	}
	return true
}

// members returns the exported identifiers of a package, and the exported fields and methods of its types, by
// their names.
func members(p *types.Package) map[types.Object]string {
	out := map[types.Object]string{}
	for _, name := range p.Scope().Names() {
		obj := p.Scope().Lookup(name)
		if !obj.Exported() {
			continue
		}
		out[obj] = name
		t, ok := obj.(*types.TypeName)
		if !ok || t.IsAlias() {
			continue
		}
		n := t.Type().(*types.Named)
		for m := range n.Methods() {
			if m.Exported() && !slices.Contains([]string{"String", "Error", "Unwrap", "Apply", "Limits", "Equal", "Name"}, m.Name()) {
				out[m] = name + "." + m.Name()
			}
		}
		if s, ok := n.Underlying().(*types.Struct); ok {
			for f := range s.Fields() {
				if f.Exported() && !f.Embedded() {
					out[f] = name + "." + f.Name()
				}
			}
		}
	}
	return out
}

// uses returns the objects of other packages that the package's product files use.
func (p *listedPackage) uses(fset *token.FileSet, imp types.Importer) (map[types.Object]bool, error) {
	var files []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	c := types.Config{Importer: imp, GoVersion: "go1.26"}
	if _, err := c.Check(p.ImportPath, fset, files, info); err != nil {
		return nil, err
	}
	out := map[types.Object]bool{}
	for _, obj := range info.Uses {
		switch o := obj.(type) {
		case *types.Var:
			obj = o.Origin()
		case *types.Func:
			obj = o.Origin()
		}
		out[obj] = true
	}
	return out, nil
}
