package ipvs

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/tracker"
)

// FuzzAnswers decodes arbitrary answers of the kernel about sets and addresses, which must
// not panic. Encoded elements must decode to themselves.
func FuzzAnswers(f *testing.F) {
	seed := entry{set: setLoadBalancerSourceCIDR, family: tracker.IPv4, addr: netip.MustParseAddr("203.0.113.1"), proto: inet.TCP, port: 80, other: netip.MustParsePrefix("172.16.0.0/12")}
	f.Add(appendEntry(nil, seed, 0, 1), uint8(seed.set), uint16(80), uint32(0))
	f.Add(appendEntry(nil, entry{set: setIPs, family: tracker.IPv6, addr: netip.MustParseAddr("2001:db8::1")}, 0, 1), uint8(setIPs), uint16(0), uint32(7))
	f.Add([]byte{4, 0, 1, 0, 255, 255, 7}, uint8(setShortCircuit), uint16(9), uint32(0x3001))
	f.Add([]byte{}, uint8(0), uint16(0), uint32(0))
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte, set uint8, port uint16, mark uint32) {
		id := setID(set % uint8(setCount))
		for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			for _, inner := range nfnl.Attributes(data) {
				e, _ := decodeEntry(id, family, inner)
				if e.set != id || e.family != family {
					t.Errorf("%v", e)
				}
			}
		}
		d := &device{index: 7}
		for b := data; len(b) > 0; b = b[min(len(b), 5):] {
			d.concerns(syscall.NetlinkMessage{Data: b})
		}
		// Encode an element and decode it.
		addr := netip.AddrFrom4([4]byte{203, 0, byte(mark), byte(port)})
		e := entry{set: id, family: tracker.IPv4}
		kind := sets[id].kind
		if kind != bitmapPort {
			e.addr = addr
		}
		if kind != hashIP {
			e.port = port
		}
		if kind != hashIP && kind != bitmapPort {
			e.proto = uint8(mark)
		}
		switch kind {
		case hashIPPortIP:
			e.other = netip.PrefixFrom(addr.Next(), 32)
		case hashIPPortNet:
			e.other = netip.PrefixFrom(addr.Next(), int(mark%32)+1)
		}
		for typ, data := range nfnl.Attributes(appendEntry(nil, e, mark, 1)) {
			got, gotMark := decodeEntry(id, tracker.IPv4, data)
			if typ != nl.IPSET_ATTR_DATA || got != e || kind == hashIPPortMark && gotMark != mark {
				t.Errorf("attribute %d: %v with %#x, want %v with %#x", typ, got, gotMark, e, mark)
			}
		}
		if n := binary.NativeEndian.Uint16(appendEntry(nil, e, mark, 1)); int(n) < unix.SizeofNlAttr {
			t.Errorf("an attribute of %d bytes", n)
		}
	})
}
