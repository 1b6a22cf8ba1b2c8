package socketlb

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// hook is a program and its link to the cgroup.
type hook struct {
	name    string
	attach  ebpf.AttachType
	program *ebpf.Program
	// link is open until the next one is attached: when the file of a link that is not open is removed, the kernel
	// detaches the program later, and both would see a connection.
	link link.Link
}

type hooks []*hook

// hookNames are the names of all hooks, of their programs in programs.c, and of the files of their links.
var hookNames = []string{"connect4", "getpeername4", "connect6", "getpeername6", "release", "sendmsg4", "recvmsg4", "sendmsg6", "recvmsg6"}

// load loads the programs, those of IPv6 on nodes without IPv6, too: a socket of IPv6 may connect to
// IPv4-mapped addresses. host is the cookie of the node's network namespace.
func (h *hooks) load(m bpfMaps, spec *ebpf.CollectionSpec, host uint64) error {
	err := errors.Join(
		spec.Variables["host"].Set(host),
		spec.Variables["recent_size"].Set(m["recent"].MaxEntries()),
		spec.Variables["namespaces_size"].Set(m["namespaces"].MaxEntries()),
		spec.Variables["namespace_flows"].Set(max(1, m["flows"].MaxEntries()/namespaceShare)),
	)
	if err != nil {
		return err
	}
	for _, name := range hookNames {
		spec.Programs[name].Name = "proxier_" + name[:4]
	}
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: m})
	switch {
	case errors.Is(err, fs.ErrPermission): // some kernels check CAP_PERFMON in the verifier, which returns EACCES
		return unsupported("loading BPF programs", err)
	case err != nil: // EINVAL, or another error of the verifier
		// The kernel needs bpf_get_netns_cookie for programs that see datagrams.
		return &dataplane.UnsupportedError{Backend: "socketlb", Feature: "a BPF program", Minimum: "Linux 5.14", Err: err}
	}
	defer loaded.Close()
	for _, name := range hookNames {
		*h = append(*h, &hook{name: name, attach: spec.Programs[name].AttachType, program: loaded.DetachProgram(name)})
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
	is, err := link.LoadPinnedLink(path, nil)
	if err != nil || attachedTo(is) != cgroup || is.Update(k.program) != nil {
		if err == nil {
			defer is.Close() // detaches it
		}
		is, err = link.AttachCgroup(link.CgroupOptions{Path: c.Cgroup, Attach: k.attach, Program: k.program})
		if err != nil {
			return err
		}
		if err := replaceFile(path, is.Pin); err != nil {
			is.Close()
			return err
		}
	}
	k.close()
	k.link = is
	return nil
}

// close closes the link's file. The link stays as long as it is pinned.
func (k *hook) close() {
	if k.link != nil {
		k.link.Close()
	}
}

// check returns an error if the program is not in effect, or its link has no file.
func (k *hook) check(c *Config) error {
	found, err := link.LoadPinnedLink(filepath.Join(c.Dir, k.name), nil)
	if err != nil {
		return fmt.Errorf("the link's file cannot be opened: %w", err)
	}
	defer found.Close()
	info, errLink := found.Info()
	program, errProgram := k.program.Info()
	cgroup, errCgroup := cgroupID(c.Cgroup)
	if err := errors.Join(errLink, errProgram, errCgroup); err != nil {
		return err
	}
	switch id, _ := program.ID(); {
	case info.Program != id:
		return errors.New("another program is attached")
	case attachedTo(found) != cgroup:
		return errors.New("the program is detached")
	}
	return nil
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
