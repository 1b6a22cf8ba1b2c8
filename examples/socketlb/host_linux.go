package socketlb

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// host is the node's network namespace.
type host struct {
	// cookie is the value of bpf_get_netns_cookie for sockets of the namespace.
	cookie uint64
	ns     *netns.Namespace
	nl     *netlink.Handle
}

// openHost returns the network namespace of the file, or of the calling thread if file is
// nil.
func openHost(file *os.File) (*host, error) {
	ns, err := netns.Open(file)
	if err != nil {
		return nil, fmt.Errorf("socketlb: %w", err)
	}
	h := &host{ns: ns}
	err = netns.In(ns.File(), func() (err error) {
		if h.cookie, err = netnsCookie(); err != nil {
			return &dataplane.UnsupportedError{Backend: "socketlb", Feature: "the socket option SO_NETNS_COOKIE", Minimum: "Linux 5.14", Err: err}
		}
		h.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return h, nil
}

// netnsCookie returns the cookie of the calling thread's network namespace.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// ipvsDevice is the device to which mode ipvs of kube-proxy, and package ipvs, binds the
// addresses of Services. NodePorts do not answer there.
const ipvsDevice = "kube-ipvs0"

// addresses returns the node's own addresses without loopback and link-local addresses, which
// other network namespaces may have, too.
func (h *host) addresses() ([]netip.Addr, error) {
	skip := 0
	if link, err := h.nl.LinkByName(ipvsDevice); err == nil {
		skip = link.Attrs().Index
	}
	list, err := nfnl.Whole(context.Background(), netlink.ErrDumpInterrupted, func() ([]netlink.Addr, error) { return h.nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("socketlb: cannot list the node's addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range list {
		addr, ok := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); ok && a.LinkIndex != skip && !addr.IsLoopback() && !addr.IsLinkLocalUnicast() {
			out = append(out, addr)
		}
	}
	return out, nil
}

func (h *host) close() {
	h.nl.Close()
	h.ns.Close()
}

// RootCgroup returns the folder of the root of the cgroup2 file system, the default of
// Config.Cgroup. The error is a [*dataplane.UnsupportedError] if the root is not mounted, as in
// a container that has only its own cgroup.
func RootCgroup() (string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("socketlb: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		mount, system, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if len(fields) < 5 || !strings.HasPrefix(system, "cgroup2 ") {
			continue
		}
		// The inode of the root is 1 (KERNFS_ROOT in fs/kernfs). In a container the
		// container's own cgroup may be mounted there.
		var st unix.Stat_t
		if unix.Stat(fields[4], &st) == nil && st.Ino == 1 {
			return fields[4], nil
		}
	}
	return "", &dataplane.UnsupportedError{Backend: "socketlb", Feature: "finding the root cgroup (in a container, mount the host's /sys/fs/cgroup and name the folder)"}
}

// checkPlaces returns an error if Cgroup is not a cgroup, or Dir is not in a BPF file system.
func checkPlaces(c *Config) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(c.Cgroup, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return &dataplane.UnsupportedError{Backend: "socketlb", Feature: fmt.Sprintf("%s, which is not a cgroup2 folder,", c.Cgroup), Err: err}
	}
	parent := filepath.Dir(c.Dir)
	if err := unix.Statfs(parent, &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
		return &dataplane.UnsupportedError{Backend: "socketlb", Feature: fmt.Sprintf("%s, which is not in a BPF file system (mount -t bpf bpf /sys/fs/bpf),", parent), Err: err}
	}
	return nil
}

// TemporaryDir returns a folder for Config.Dir in a BPF file system that only this process
// can access. The file system is removed when closeDir is called or the process ends. It is
// for tests and demonstrations. The error is a [*dataplane.UnsupportedError].
func TemporaryDir() (dir string, closeDir func() error, err error) {
	fs, err := unix.Fsopen("bpf", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", nil, unsupported("a BPF file system", os.NewSyscallError("fsopen", err))
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return "", nil, unsupported("a BPF file system", os.NewSyscallError("fsconfig", err))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return "", nil, unsupported("a BPF file system", os.NewSyscallError("fsmount", err))
	}
	return fmt.Sprintf("/proc/self/fd/%d/socketlb", fd), func() error { return unix.Close(fd) }, nil
}

// unsupported returns an error about a feature that the kernel or the process's capabilities
// do not allow.
func unsupported(feature string, err error) error {
	if errors.Is(err, fs.ErrPermission) {
		feature += " without CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN in the initial user namespace"
	}
	return &dataplane.UnsupportedError{Backend: "socketlb", Feature: feature, Err: err}
}
