package vm

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// kernelEnv names the folder with the kernel to boot.
const kernelEnv = "PROXIER_VM_KERNEL"

// kernel is a kernel to boot.
type kernel struct {
	release string
	image   string
	// modules holds the path of each module, by its name with underscores.
	modules map[string]string
}

// findKernel looks for a kernel with its modules.
func findKernel() (*kernel, error) {
	var roots []string
	if dir := os.Getenv(kernelEnv); dir != "" {
		roots = []string{dir}
	} else {
		if cache, err := os.UserCacheDir(); err == nil {
			roots = append(roots, filepath.Join(cache, "proxier", "vm-kernel"))
		}
		roots = append(roots, "/")
	}
	for _, root := range roots {
		images, err := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
		if err != nil {
			return nil, err
		}
		slices.Sort(images)
		for _, image := range slices.Backward(images) {
			release := strings.TrimPrefix(filepath.Base(image), "vmlinuz-")
			k, err := newKernel(image, release, filepath.Join(root, "lib", "modules", release, "kernel"))
			if err == nil {
				return k, nil
			}
			if !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		}
	}
	return nil, fmt.Errorf("no kernel with modules below %s (run .ci/vm-kernel, or set %s)",
		strings.Join(roots, " or "), kernelEnv)
}

func newKernel(image, release, dir string) (*kernel, error) {
	k := &kernel{release: release, image: image, modules: map[string]string{}}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if name, ok := strings.CutSuffix(d.Name(), ".ko"); err == nil && ok {
			k.modules[moduleName(name)] = path
		}
		return err
	})
	return k, err
}

func moduleName(file string) string { return strings.ReplaceAll(file, "-", "_") }

// matching returns the modules whose names match one of the patterns, sorted.
func (k *kernel) matching(patterns ...string) []string {
	var out []string
	for name := range k.modules {
		for _, p := range patterns {
			if ok, _ := filepath.Match(p, name); ok {
				out = append(out, name)
				break
			}
		}
	}
	slices.Sort(out)
	return out
}

// ordered returns the files of the named modules and of their dependencies. A file comes
// after the files that it depends on. A name without a file counts as built in.
func (k *kernel) ordered(names []string) (files []string, err error) {
	done := map[string]bool{}
	var add func(string) error
	add = func(name string) error {
		path := k.modules[name]
		if done[name] || path == "" {
			return nil
		}
		done[name] = true
		needs, err := moduleDepends(path)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, n := range needs {
			if err := add(moduleName(n)); err != nil {
				return err
			}
		}
		files = append(files, path)
		return nil
	}
	for _, n := range names {
		if err := add(n); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// moduleDepends returns the dependencies of a module from its .modinfo section
// (include/linux/module.h), because an unpacked package has no modules.dep.
func moduleDepends(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("no .modinfo")
	}
	data, err := s.Data()
	if err != nil {
		return nil, err
	}
	for field := range bytes.SplitSeq(data, []byte{0}) {
		if list, ok := bytes.CutPrefix(field, []byte("depends=")); ok && len(list) != 0 {
			return strings.Split(string(list), ","), nil
		}
	}
	return nil, nil
}
