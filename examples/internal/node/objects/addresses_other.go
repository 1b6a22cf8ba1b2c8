//go:build !linux

package objects

import (
	"net"
	"net/netip"
)

// OpenAddresses returns a function that reads the node's own addresses, and one that does nothing. It
// returns no function for ranges, because no data plane here drops packets to unused cluster IPs.
func OpenAddresses() (own func() ([]netip.Addr, error), ranges func() (Ranges, error), stop func(), err error) {
	return ownAddresses, nil, func() {}, nil
}

// ownAddresses returns, in each family, the source address of connections to outside: to an
// address for documentation, to which nothing is sent.
func ownAddresses() ([]netip.Addr, error) {
	var out []netip.Addr
	for _, to := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		c, err := net.Dial("udp", to)
		if err != nil {
			continue // no route in this family
		}
		if a, ok := c.LocalAddr().(*net.UDPAddr); ok {
			out = append(out, a.AddrPort().Addr().Unmap())
		}
		c.Close()
	}
	return out, nil
}
