// Package inetdiag lists and ends the sockets of a network namespace. netlink's SocketDestroy knows TCP over IPv4 alone.
package inetdiag

import (
	"encoding/binary"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Offsets and sizes of include/uapi/linux/inet_diag.h: struct inet_diag_sockid in struct inet_diag_req_v2 and in struct
// inet_diag_msg, and the fields of the former.
const (
	reqStates, reqID, reqSize = 4, 8, 56
	msgID                     = 4
	idSource, idTarget        = 4, 20
	idCookie, idSize          = 40, 48
)

// Socket is a socket of TCP or UDP.
type Socket struct {
	family, protocol byte
	id               [idSize]byte
}

// List calls f with each socket of the calling thread's network namespace that has a protocol, a family (AF_INET or
// AF_INET6; the latter may have IPv4-mapped addresses), and one of the states, bits by number of include/net/tcp_states.h.
// If the kernel has no module for it, the error wraps ENOENT.
func List(protocol, family byte, states uint32, f func(Socket)) error {
	r := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
	s := Socket{family: family, protocol: protocol}
	r.AddRawData(s.request(states))
	return r.ExecuteIter(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(m []byte) bool {
		if len(m) >= msgID+idSize {
			copy(s.id[:], m[msgID:])
			f(s)
		}
		return true
	})
}

func (s *Socket) request(states uint32) []byte {
	out := make([]byte, reqSize)
	out[0], out[1] = s.family, s.protocol
	binary.NativeEndian.PutUint32(out[reqStates:], states)
	copy(out[reqID:], s.id[:])
	return out
}

// Local returns the socket's own address and port.
func (s *Socket) Local() netip.AddrPort { return s.at(idSource, 0) }

// Remote returns the address and port that the socket is connected to.
func (s *Socket) Remote() netip.AddrPort { return s.at(idTarget, 2) }

func (s *Socket) at(addr, port int) netip.AddrPort {
	length := 16
	if s.family == unix.AF_INET {
		length = 4
	}
	a, _ := netip.AddrFromSlice(s.id[addr : addr+length])
	return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(s.id[port:]))
}

// Cookie returns the number that the kernel gave the socket, which SO_COOKIE returns, too.
func (s *Socket) Cookie() uint64 {
	c := s.id[idCookie:]
	return uint64(binary.NativeEndian.Uint32(c[4:]))<<32 | uint64(binary.NativeEndian.Uint32(c))
}

// Destroy ends the socket's connection (SOCK_DESTROY of include/uapi/linux/sock_diag.h): the process gets ECONNABORTED. If
// the socket is closed, the error wraps ENOENT, and if the kernel cannot destroy sockets, EOPNOTSUPP.
func (s *Socket) Destroy() error {
	r := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	r.AddRawData(s.request(0))
	_, err := r.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
}
