// Proxy writes this checkout's modules to a folder that the go command reads as a module proxy,
// GOPROXY=file://FOLDER, as they will be after the next release:
//
//	go run . FOLDER
//
// It prints the version, which is the one that the examples require of the library.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// library is the path of the module in the repository's root.
const library = "github.com/go-proxier/proxier"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: proxy FOLDER")
		os.Exit(2)
	}
	version, err := write("../..", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "proxy:", err)
		os.Exit(1)
	}
	fmt.Println(version)
}

// write writes the modules of the repository at root to a folder, and returns their version.
func write(root, folder string) (version string, err error) {
	text, err := os.ReadFile(filepath.Join(root, "examples/go.mod"))
	if err != nil {
		return "", err
	}
	mod, err := modfile.Parse("examples/go.mod", text, nil)
	if err != nil {
		return "", err
	}
	for _, r := range mod.Require {
		if r.Mod.Path == library {
			version = r.Mod.Version
		}
	}
	if version == "" || len(mod.Replace) != 0 {
		return "", errors.New("examples/go.mod must require the library and have no replace directive, or it cannot be installed")
	}
	for path, dir := range map[string]string{library: root, library + "/examples": filepath.Join(root, "examples")} {
		if err := writeModule(module.Version{Path: path, Version: version}, dir, filepath.Join(folder, path, "@v")); err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
	}
	return version, nil
}

// writeModule writes the four files of a module version.
func writeModule(m module.Version, dir, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err != nil {
		return err
	}
	info, err := json.Marshal(map[string]any{"Version": m.Version, "Time": time.Now().UTC().Truncate(time.Second)})
	if err != nil {
		return err
	}
	for name, text := range map[string][]byte{"list": []byte(m.Version + "\n"), m.Version + ".mod": mod, m.Version + ".info": info} {
		if err := os.WriteFile(filepath.Join(to, name), text, 0o644); err != nil {
			return err
		}
	}
	f, err := os.Create(filepath.Join(to, m.Version+".zip"))
	if err != nil {
		return err
	}
	return errors.Join(zip.CreateFromDir(f, m, dir), f.Close())
}
