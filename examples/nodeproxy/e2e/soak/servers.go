//go:build linux

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netlab"
)

// serve starts the servers of a host, which run until the process ends. A server answers a
// connection or a datagram with a line that holds its own address and the client's address
// as it sees them: "10.244.1.11:8080 192.0.2.10:40000". Over TCP it then echoes what it
// receives.
func serve(h *netlab.Host) error {
	l, err := h.Listen("tcp", fmt.Sprintf("[::]:%d", podPort))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				self, peer := plain(c.LocalAddr()), plain(c.RemoteAddr())
				if _, err := fmt.Fprintf(c, "%s %s\n", self, peer); err == nil {
					io.Copy(c, c)
				}
			}()
		}
	}()
	for _, network := range []string{"udp4", "udp6"} {
		if err := serveUDP(h, network); err != nil {
			return err
		}
	}
	return nil
}

// plain returns the address and port of a TCP address.
func plain(a net.Addr) netip.AddrPort {
	p := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

// serveUDP answers each datagram from the address that it was sent to.
func serveUDP(h *netlab.Host, network string) error {
	host := "0.0.0.0"
	if network == "udp6" {
		host = "[::]"
	}
	p, err := h.ListenPacket(network, fmt.Sprintf("%s:%d", host, podPort))
	if err != nil {
		return err
	}
	c := p.(*net.UDPConn)
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := raw.Control(func(fd uintptr) {
		if network == "udp6" {
			// The addresses of a local range belong to no interface. IPV6_FREEBIND
			// (linux/in6.h) allows the socket to send from them.
			serr = errors.Join(
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1))
		} else {
			serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
	}); err != nil {
		return err
	}
	if serr != nil {
		return serr
	}
	go func() {
		buf, oob := make([]byte, 100), make([]byte, 100)
		for {
			_, m, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
			if err != nil {
				return
			}
			// The client reports a missing answer.
			if self, reply, ok := packetInfo(oob[:m]); ok {
				_, _, _ = c.WriteMsgUDPAddrPort(fmt.Appendf(nil, "%s %s\n", netip.AddrPortFrom(self, podPort), netip.AddrPortFrom(from.Addr().Unmap(), from.Port())), reply, from)
			}
		}
	}()
	return nil
}

// packetInfo returns the address that a datagram was sent to, and the control message for
// an answer from that address (ip(7), IP_PKTINFO; ipv6(7), IPV6_PKTINFO).
func packetInfo(oob []byte) (self netip.Addr, reply []byte, ok bool) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(list) == 0 {
		return self, nil, false
	}
	switch d := list[0].Data; {
	case list[0].Header.Type == unix.IP_PKTINFO && len(d) >= 12:
		self, _ = netip.AddrFromSlice(d[8:12])
		info := unix.Inet4Pktinfo{Spec_dst: [4]byte(d[8:12])}
		return self, unix.PktInfo4(&info), true
	case list[0].Header.Type == unix.IPV6_PKTINFO && len(d) >= 20:
		self, _ = netip.AddrFromSlice(d[:16])
		info := unix.Inet6Pktinfo{Addr: [16]byte(d[:16]), Ifindex: binary.NativeEndian.Uint32(d[16:20])}
		return self, unix.PktInfo6(&info), true
	}
	return self, nil, false
}
