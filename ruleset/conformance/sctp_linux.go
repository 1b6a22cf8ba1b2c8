package conformance

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// Probes use only the first two packets of an SCTP association (RFC 9260 section
// 5.1), through raw sockets. A data plane needs no more to forward it, and the kernel
// needs only connection tracking and NAT for SCTP.

const (
	protoSCTP = "132"
	// Chunk types (RFC 9260 section 3.2) and the parameter of a reply that carries
	// the server's greeting (section 3.3.3.1).
	chunkInit, chunkInitAck = 1, 2
	paramStateCookie        = 7
	// The offset of the first parameter of both chunks: the common header, the
	// chunk's header and its fixed part.
	initParams = 12 + 4 + 16
)

// sctpTracked reports whether the kernel can track and translate SCTP.
func sctpTracked() bool {
	_, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_sctp_timeout_closed")
	return err == nil
}

// sctpPacket returns a packet with one INIT or INIT ACK chunk.
func sctpPacket(from, to uint16, verification uint32, chunk byte, tag uint32, cookie []byte) []byte {
	be := binary.BigEndian
	b := be.AppendUint16(nil, from)
	b = be.AppendUint16(b, to)
	b = be.AppendUint32(b, verification)
	b = be.AppendUint32(b, 0) // checksum
	length := 20
	if cookie != nil {
		length += 4 + len(cookie)
	}
	b = append(b, chunk, 0)
	b = be.AppendUint16(b, uint16(length))
	b = be.AppendUint32(b, tag)
	b = be.AppendUint32(b, 65536) // receiver window
	b = be.AppendUint16(b, 1)     // streams out
	b = be.AppendUint16(b, 1)     // streams in
	b = be.AppendUint32(b, 1)     // initial TSN
	if cookie != nil {
		b = be.AppendUint16(b, paramStateCookie)
		b = be.AppendUint16(b, uint16(4+len(cookie)))
		b = append(b, cookie...)
		for len(b)%4 != 0 {
			b = append(b, 0)
		}
	}
	// The only little-endian field (appendix A).
	binary.LittleEndian.PutUint32(b[8:], sctpChecksum(b))
	return b
}

func sctpChecksum(packet []byte) uint32 {
	b := slices.Clone(packet)
	clear(b[8:12])
	return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
}

// sctpHeader holds the fields of a packet that matter here.
type sctpHeader struct {
	from, to          uint16
	verification, tag uint32
	chunk             byte
	cookie            []byte
}

// parseSCTP parses a packet. ok reports whether it has a chunk that these probes use
// and a correct checksum.
func parseSCTP(b []byte) (h sctpHeader, ok bool) {
	be := binary.BigEndian
	if len(b) < initParams || binary.LittleEndian.Uint32(b[8:]) != sctpChecksum(b) {
		return h, false
	}
	h = sctpHeader{
		from: be.Uint16(b), to: be.Uint16(b[2:]), verification: be.Uint32(b[4:]),
		chunk: b[12], tag: be.Uint32(b[16:]),
	}
	if p := b[initParams:]; len(p) >= 4 {
		n := int(be.Uint16(p[2:]))
		if n < 4 || n > len(p) {
			return h, false
		}
		h.cookie = p[4:n]
	}
	return h, true
}

// serveSCTP makes every pod respond to INITs to its ports with its greeting.
func (n *network) serveSCTP(s *World) {
	s.tb.Helper()
	for _, f := range s.Env.Families {
		for _, pod := range s.pods {
			at := address(pod, f)
			var c *net.IPConn
			err := n.hosts[pod].ns.Do(func() (err error) {
				c, err = net.ListenIP(rawSCTP(f), ipAddr(at))
				return err
			})
			if err != nil {
				s.tb.Fatal(err)
			}
			s.tb.Cleanup(func() { c.Close() })
			go answerSCTP(c, at)
		}
	}
}

func answerSCTP(c *net.IPConn, self netip.Addr) {
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFromIP(buf)
		if err != nil {
			return
		}
		h, ok := parseSCTP(buf[:n])
		if !ok || h.chunk != chunkInit || h.to != podPort && h.to != podPort2 {
			continue
		}
		peer, _ := netip.AddrFromSlice(from.IP)
		text := netlab.Greeting(netip.AddrPortFrom(self, h.to), netip.AddrPortFrom(peer, h.from))
		_, _ = c.WriteToIP(sctpPacket(h.to, h.from, h.tag, chunkInitAck, 1, text), from)
	}
}

// probeSCTP sends an INIT and returns the server's greeting.
func (h host) probeSCTP(ctx context.Context, to netip.AddrPort) (string, error) {
	f := tracker.FamilyOf(to.Addr())
	var c *net.IPConn
	err := h.open(func() error {
		return h.ns.Do(func() (err error) {
			c, err = net.DialIP(rawSCTP(f), ipAddr(address(h.name, f)), ipAddr(to.Addr()))
			return err
		})
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	port, tag := h.port(), 1+rand.Uint32N(1<<31)
	return ask(ctx, c, sctpPacket(port, to.Port(), 0, chunkInit, tag, nil), func(b []byte) (string, bool) {
		a, ok := parseSCTP(b)
		if !ok || a.chunk != chunkInitAck || a.from != to.Port() || a.to != port || a.verification != tag {
			return "", false
		}
		return string(a.cookie), true
	})
}

func rawSCTP(f tracker.Family) string {
	if f == tracker.IPv6 {
		return "ip6:" + protoSCTP
	}
	return "ip4:" + protoSCTP
}

func ipAddr(a netip.Addr) *net.IPAddr { return &net.IPAddr{IP: a.AsSlice()} }
