//go:build linux

package takeover

import (
	"bytes"
	"net"
	"os"
	"strconv"
	"syscall"

	"github.com/vishvananda/netlink"
)

// KubeProxyRuns reports whether a process of root named kube-proxy runs in the network namespace of
// the calling thread. It does not count this process, its children, and its parent, which may be a script
// of this name. It finds the processes that /proc has: in a container that is not in the host's PID
// namespace, only those of the container.
//
// Reading a link in /proc/PID/ns needs the right to trace the process, which a process with few
// capabilities does not have. The files in /proc/PID/net need no right, and those of two network
// namespaces have different inodes.
func KubeProxyRuns() bool {
	own, err := os.Stat("/proc/thread-self/net/dev")
	if err != nil {
		return false
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || pid == os.Getppid() {
			continue
		}
		dir := "/proc/" + e.Name()
		name, err := os.ReadFile(dir + "/comm")
		if err != nil || string(bytes.TrimSpace(name)) != string(KubeProxy) {
			continue
		}
		if info, err := os.Stat(dir); err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 {
			continue
		}
		// A zombie has no network namespace.
		found, err := os.Stat(dir + "/net/dev")
		if err == nil && os.SameFile(own, found) && parentOf(dir) != os.Getpid() {
			return true
		}
	}
	return false
}

// parentOf returns the parent's ID of the process that has a folder in /proc, or 0. A child that has
// not yet executed its program has the name of its parent.
func parentOf(dir string) int {
	// "PID (NAME) STATE PARENT ...". The name may have any characters.
	text, _ := os.ReadFile(dir + "/stat")
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(string(fields[1]))
	return parent
}

// ListenerIsRoots reports whether root owns the socket that listens at a TCP address, host:port, in
// the network namespace of the calling thread. Any process with the network namespace of the host
// can answer as kube-proxy, which needs root. If the kernel does not tell (inet_diag), it returns
// true.
func ListenerIsRoots(addr string) bool {
	at, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return true
	}
	// No connection has this peer, so the kernel finds the listening socket.
	s, err := netlink.SocketGet(at, &net.TCPAddr{IP: at.IP, Port: 0})
	return err != nil || s.UID == 0
}
