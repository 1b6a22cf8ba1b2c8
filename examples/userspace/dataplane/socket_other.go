//go:build !linux

package dataplane

import (
	"net/netip"
	"syscall"
)

// control leaves sockets as they are.
func control(netip.Addr, audience) func(network, address string, c syscall.RawConn) error { return nil }

// setAudience does nothing: connections from other sources are accepted and reset.
func setAudience(syscall.Conn, netip.Addr, audience) error { return nil }
