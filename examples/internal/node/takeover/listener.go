//go:build linux

package takeover

import (
	"net"

	"github.com/vishvananda/netlink"
)

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
