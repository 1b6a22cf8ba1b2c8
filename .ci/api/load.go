package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// module is the path of the library's module.
const module = "github.com/go-proxier/proxier"

// Package is one public package of the library.
type Package struct {
	// Name is the import path within the module.
	Name  string
	Types *types.Package
	// Files holds the package's syntax, without tests.
	Files []*ast.File
	Fset  *token.FileSet
}

// Load returns the public packages of the module in a folder.
func Load(dir string) ([]Package, error) {
	ours, exports, err := listed(dir, "off", "./...")
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	imp := exportImporter(fset, exports)
	var pkgs []Package
	for _, l := range ours {
		if strings.Contains(l.ImportPath+"/", "/internal/") {
			continue
		}
		p := Package{Name: strings.TrimPrefix(l.ImportPath, module+"/"), Fset: fset}
		if p.Types, err = imp.Import(l.ImportPath); err != nil {
			return nil, err
		}
		for _, name := range l.GoFiles {
			f, err := parser.ParseFile(fset, filepath.Join(l.Dir, name), nil, parser.ParseComments)
			if err != nil {
				return nil, err
			}
			p.Files = append(p.Files, f)
		}
		pkgs = append(pkgs, p)
	}
	return pkgs, nil
}

// listedPackage is a package of the workspace.
type listedPackage struct {
	ImportPath, Export, Dir string
	GoFiles                 []string
}

// listed returns the packages below module that the patterns name for Linux, with what they import, and the
// files with export data of all packages.
func listed(dir, work string, patterns ...string) (ours []listedPackage, exports map[string]string, err error) {
	cmd := exec.Command("go", append([]string{"list", "-export", "-deps", "-json=ImportPath,Export,Dir,GoFiles"}, patterns...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK="+work, "GOOS=linux", "GOFLAGS=-buildvcs=false")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, nil, fmt.Errorf("cannot run go list: %w", err)
	}
	exports = map[string]string{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listedPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return ours, exports, nil
		} else if err != nil {
			return nil, nil, err
		}
		exports[p.ImportPath] = p.Export
		if strings.HasPrefix(p.ImportPath, module+"/") {
			ours = append(ours, p)
		}
	}
}

// exportImporter imports packages from files with export data.
func exportImporter(fset *token.FileSet, exports map[string]string) types.Importer {
	return importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("no export data of %s", path)
		}
		return os.Open(exports[path])
	})
}
