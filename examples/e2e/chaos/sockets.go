//go:build linux

package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

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

// socketMeaning reads the rules of mode nftables and the maps of the socket programs.
func socketMeaning(n *node, e environment) (meaning, error) {
	m, err := nftMeaning(n, e)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(e.dir, pinned)
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		m["file "+f.Name()] = "exists"
	}
	for _, name := range socketMaps {
		if err := m.addMap(name, filepath.Join(dir, name)); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// slotBytes is the length of the number at the end of a key of the map endpoints.
const slotBytes = 4

// addMap adds the entries of a pinned map. The order of a pool's endpoints does not count.
func (m meaning) addMap(name, path string) error {
	table, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer table.Close()
	entries := map[string][]string{}
	var k, v []byte
	it := table.Iterate()
	for it.Next(&k, &v) {
		if name == "endpoints" {
			k = k[:len(k)-slotBytes]
		}
		key := "map " + name + ": " + hex.EncodeToString(k)
		entries[key] = append(entries[key], hex.EncodeToString(v))
	}
	for key, list := range entries {
		slices.Sort(list)
		m[key] = strings.Join(list, ", ")
	}
	return it.Err()
}

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
