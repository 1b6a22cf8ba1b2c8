package winkernel

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"strings"
)

// remoteMACPrefix begins the hardware addresses of the endpoints for pods of other nodes, as
// kube-proxy's do.
const remoteMACPrefix = "02-11-"

// remoteMAC returns the hardware address for the pod with the address a: the prefix and the
// IPv4 address, as kube-proxy and the network plugins of other nodes compute it. For IPv6 it
// is the prefix and a hash, plus try, which distinguishes addresses with equal hashes.
func remoteMAC(a netip.Addr, try uint32) string {
	b := a.As16()
	n := uint32(b[12])<<24 | uint32(b[13])<<16 | uint32(b[14])<<8 | uint32(b[15])
	if a.Is6() {
		h := fnv.New32a()
		h.Write(b[:])
		n = h.Sum32() + try
	}
	return fmt.Sprintf("%s%02x-%02x-%02x-%02x", remoteMACPrefix, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}

// hasRemoteMAC reports whether a normalized hardware address has the prefix.
func hasRemoteMAC(mac string) bool { return strings.HasPrefix(mac, remoteMACPrefix) }

// normalizeMAC returns a hardware address in lower case with "-" between the bytes.
func normalizeMAC(mac string) string { return strings.ReplaceAll(strings.ToLower(mac), ":", "-") }
