package socketlb

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// hook is a program and its link to the cgroup.
type hook struct {
	name    string
	attach  ebpf.AttachType
	program *ebpf.Program
	link    link.Link
}

type hooks []*hook

// hookNames are the names of all hooks and of the files of their links.
var hookNames = []string{"connect4", "getpeername4", "connect6", "getpeername6", "release", "sendmsg4", "recvmsg4", "sendmsg6", "recvmsg6"}

// load loads the programs.
func (h *hooks) load(c *Config, m *bpfMaps, cookie uint64) error {
	for _, k := range []struct {
		hook
		family  tracker.Family
		code    asm.Instructions
		minimum string
	}{
		// The minimum of connect has BPF_CMPXCHG, and the minimum of getpeername has that attach
		// type.
		{hook{name: hookNames[0], attach: ebpf.AttachCGroupInet4Connect}, tracker.IPv4, connect(tracker.IPv4, m, cookie), "Linux 5.12"},
		{hook{name: hookNames[1], attach: ebpf.AttachCgroupInet4GetPeername}, tracker.IPv4, getpeername(tracker.IPv4, m, false), "Linux 5.8"},
		// Loaded without IPv6, too: a socket of IPv6 may connect to IPv4-mapped addresses.
		{hook{name: hookNames[2], attach: ebpf.AttachCGroupInet6Connect}, tracker.IPv6, connect(tracker.IPv6, m, cookie), "Linux 5.12"},
		{hook{name: hookNames[3], attach: ebpf.AttachCgroupInet6GetPeername}, tracker.IPv6, getpeername(tracker.IPv6, m, false), "Linux 5.8"},
		{hook{name: hookNames[4], attach: ebpf.AttachCgroupInetSockRelease}, 0, release(m), "Linux 5.9"},
		{hook{name: hookNames[5], attach: ebpf.AttachCGroupUDP4Sendmsg}, tracker.IPv4, sendmsg(tracker.IPv4, m, cookie), "Linux 5.14"},
		{hook{name: hookNames[6], attach: ebpf.AttachCGroupUDP4Recvmsg}, tracker.IPv4, getpeername(tracker.IPv4, m, true), "Linux 5.2"},
		{hook{name: hookNames[7], attach: ebpf.AttachCGroupUDP6Sendmsg}, tracker.IPv6, sendmsg(tracker.IPv6, m, cookie), "Linux 5.14"},
		{hook{name: hookNames[8], attach: ebpf.AttachCGroupUDP6Recvmsg}, tracker.IPv6, getpeername(tracker.IPv6, m, true), "Linux 5.2"},
	} {
		typ := ebpf.CGroupSockAddr
		if k.attach == ebpf.AttachCgroupInetSockRelease {
			typ = ebpf.CGroupSock
		}
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "proxier_" + k.name[:4], Type: typ, AttachType: k.attach, Instructions: k.code, License: "Apache-2.0",
		})
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES) && !hasPerfmon():
			// Some kernels check CAP_PERFMON in the verifier, which returns EACCES.
			return unsupported("loading BPF programs", err)
		case err != nil: // EINVAL, or another error of the verifier
			return &dataplane.UnsupportedError{Backend: "socketlb", Family: k.family, Feature: "a BPF program for " + k.name, Minimum: k.minimum, Err: err}
		}
		k.program = p
		*h = append(*h, &k.hook)
	}
	return nil
}

// attach attaches the programs to the cgroup. It replaces a program of an earlier process in
// one step.
func (h hooks) attach(c *Config) error {
	cgroup, err := cgroupID(c.Cgroup)
	if err != nil {
		return err
	}
	for _, k := range h {
		if err := k.put(c, cgroup); err != nil {
			return fmt.Errorf("socketlb: cannot attach %s to cgroup %s: %w", k.name, c.Cgroup, err)
		}
	}
	return nil
}

func (k *hook) put(c *Config, cgroup uint64) error {
	path := filepath.Join(c.Dir, k.name)
	if found, err := link.LoadPinnedLink(path, nil); err == nil {
		if attachedTo(found) == cgroup && found.Update(k.program) == nil {
			k.close()
			k.link = found
			return nil
		}
		found.Close()
	}
	made, err := link.AttachCgroup(link.CgroupOptions{Path: c.Cgroup, Attach: k.attach, Program: k.program})
	if err != nil {
		return err
	}
	// The kernel detaches the replaced link when its last file is closed.
	if err := replaceFile(path, made.Pin); err != nil {
		made.Close()
		return err
	}
	k.close()
	k.link = made
	return nil
}

// check returns what is wrong with the link, or "".
func (k *hook) check(c *Config) string {
	if k.link == nil {
		return "the program is not attached"
	}
	info, err := k.link.Info()
	if err != nil {
		return err.Error()
	}
	program, err := k.program.Info()
	if err != nil {
		return err.Error()
	}
	id, _ := program.ID()
	cgroup, err := cgroupID(c.Cgroup)
	switch {
	case err != nil:
		return err.Error()
	case info.Program != id:
		return "another program is attached"
	case attachedTo(k.link) != cgroup:
		return "the program is detached"
	}
	found, err := link.LoadPinnedLink(filepath.Join(c.Dir, k.name), nil)
	if err != nil {
		return "the link's file is missing"
	}
	defer found.Close()
	if other, err := found.Info(); err != nil || other.ID != info.ID {
		return "the link's file belongs to another link"
	}
	return ""
}

// close closes the link's file. The link stays as long as it is pinned.
func (k *hook) close() {
	if k.link != nil {
		k.link.Close()
		k.link = nil
	}
}

func (h hooks) close() {
	for _, k := range h {
		k.close()
		k.program.Close()
	}
}

// attachedTo returns the ID of the cgroup that a link attaches its program to, or 0.
func attachedTo(l link.Link) uint64 {
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil {
		return 0
	}
	return info.Cgroup().CgroupId
}

// cgroupID returns the ID of a cgroup, which is its folder's inode (cgroup_id of
// include/linux/cgroup.h).
func cgroupID(folder string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(folder, &st); err != nil {
		return 0, fmt.Errorf("socketlb: cannot read cgroup %s: %w", folder, err)
	}
	return st.Ino, nil
}

// files returns the paths of the existing files of a backend, links first. They may be those of
// another version.
func files(c *Config) (out []string) {
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return nil // no folder, or not one that this process may read
	}
	exists := func(name string) bool {
		return slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == name })
	}
	for _, name := range hookNames {
		if exists(name) {
			out = append(out, filepath.Join(c.Dir, name))
		}
	}
	for _, e := range entries {
		if !slices.Contains(hookNames, e.Name()) {
			out = append(out, filepath.Join(c.Dir, e.Name()))
		}
	}
	return out
}
