//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/socketlb"
)

// bpfRoot is where an agent expects the BPF file system, and pinned is its folder there.
const (
	bpfRoot = "/sys/fs/bpf"
	pinned  = "proxier-socketlb"
)

// probeSockets returns an error if this process cannot load socket programs.
func probeSockets() error {
	dir, closeDir, err := socketlb.TemporaryDir()
	if err != nil {
		return err
	}
	root, err := socketlb.RootCgroup()
	if err == nil {
		err = socketlb.Probe(context.Background(), socketlb.Config{Dir: dir, Cgroup: root})
	}
	return errors.Join(err, closeDir())
}

// prepareSockets creates a BPF file system and a cgroup without processes for one agent.
func prepareSockets() (e environment, err error) {
	root, err := socketlb.RootCgroup()
	if err != nil {
		return e, err
	}
	if e.dir, err = os.MkdirTemp("", "chaos-bpf-"); err != nil {
		return e, err
	}
	if err = unix.Mount("bpf", e.dir, "bpf", 0, ""); err != nil {
		return e, errors.Join(fmt.Errorf("cannot mount a BPF file system: %w", err), os.Remove(e.dir))
	}
	cgroup, err := os.MkdirTemp(root, "chaos-")
	if err != nil {
		return e, errors.Join(err, unix.Unmount(e.dir, unix.MNT_DETACH), os.Remove(e.dir))
	}
	dir := e.dir
	e.close = func() {
		unix.Unmount(dir, unix.MNT_DETACH)
		os.Remove(dir)
		os.Remove(cgroup)
	}
	e.args = []string{"--socket-lb-cgroup", cgroup}
	e.wrap = func(c *exec.Cmd) *exec.Cmd {
		script := `mount --make-rprivate / && mount --bind "$0" ` + bpfRoot + ` && exec "$@"`
		return exec.Command("unshare", append([]string{"-m", "sh", "-c", script, dir}, c.Args...)...)
	}
	return e, nil
}

// socketMaps lists the maps whose entries the objects determine.
var socketMaps = []string{"frontends", "endpoints", "members", "addresses"}

// socketFaults damage the maps and links of the socket programs.
var socketFaults = []fault{
	{"delete a file", none, func(w *world) (string, error) {
		files, _ := filepath.Glob(filepath.Join(w.env.dir, pinned, "*"))
		if len(files) == 0 {
			return "no file", nil
		}
		f := pick(w.rng, files...)
		return filepath.Base(f), os.Remove(f)
	}},
	{"delete all files", none, func(w *world) (string, error) { return "", os.RemoveAll(filepath.Join(w.env.dir, pinned)) }},
	{"delete an entry", none, func(w *world) (string, error) {
		name := pick(w.rng, socketMaps...)
		table, err := ebpf.LoadPinnedMap(filepath.Join(w.env.dir, pinned, name), nil)
		if err != nil {
			return "no map", nil
		}
		defer table.Close()
		key, err := table.NextKeyBytes(nil)
		if err != nil || key == nil {
			return "no entry", err
		}
		return name, table.Delete(key)
	}},
}
