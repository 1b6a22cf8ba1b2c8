//go:build linux

package takeover

import (
	"fmt"
	"net"
	"os"

	"github.com/prometheus/procfs"
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
	processes, _ := procfs.AllProcs()
	for _, p := range processes {
		stat, err := p.Stat()
		if err != nil || stat.Comm != "kube-proxy" || p.PID == os.Getpid() || p.PID == os.Getppid() {
			continue
		}
		// A child that has not yet executed its program has the name of its parent. The second ID is the effective one.
		if status, err := p.NewStatus(); err != nil || stat.PPID == os.Getpid() || status.UIDs[1] != 0 {
			continue
		}
		// A zombie has no network namespace.
		if found, err := os.Stat(fmt.Sprintf("/proc/%d/net/dev", p.PID)); err == nil && os.SameFile(own, found) {
			return true
		}
	}
	return false
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
