package ipvs

import (
	"encoding/binary"
	"errors"
	"maps"
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestListIsReadUntilTwoAreEqual reads lists in which the kernel left elements out.
func TestListIsReadUntilTwoAreEqual(t *testing.T) {
	t.Parallel()
	type list = map[string]int
	whole := list{"a": 1, "b": 2, "c": 3}
	broken := errors.New("broken")
	for _, c := range []struct {
		name  string
		lists []list // the last one repeats; nil is an error
		want  list
		reads int
	}{
		{"quiet", []list{whole}, whole, 2},
		{"empty", []list{{}}, list{}, 2},
		{"the first list lacks an element", []list{{"a": 1, "c": 3}, whole}, whole, 3},
		{"the second list lacks an element", []list{whole, {"b": 2, "c": 3}, whole}, whole, 4},
		{"an element is deleted", []list{whole, {"a": 1}}, list{"a": 1}, 3},
		{"an element is changed", []list{{"a": 1}, {"a": 7}}, list{"a": 7}, 3},
		{"an error", []list{whole, nil}, nil, 2},
	} {
		reads := 0
		got, err := sameTwice(func() (list, error) {
			l := c.lists[min(reads, len(c.lists)-1)]
			reads++
			if l == nil {
				return nil, broken
			}
			return l, nil
		})
		if !maps.Equal(got, c.want) || reads != c.reads || (c.want == nil) != errors.Is(err, broken) {
			t.Errorf("%s: %v after %d reads, %v; want %v after %d", c.name, got, reads, err, c.want, c.reads)
		}
	}
	// If no two lists are equal, the result has all elements.
	reads := 0
	got, err := sameTwice(func() (list, error) {
		reads++
		return list{"a": 1, []string{"b", "c"}[reads%2]: 0}, nil
	})
	if err != nil || !maps.Equal(got, list{"a": 1, "b": 0, "c": 0}) || reads > 100 {
		t.Errorf("%v after %d reads, %v", got, reads, err)
	}
}

// testForwardingIsReadBack writes real servers with each forwarding, and changes it.
func testForwardingIsReadBack(t *testing.T) {
	k := newRig(t, newHost(t), Config{}).backend.kernel
	for family, reals := range map[tracker.Family][2]netip.AddrPort{
		tracker.IPv4: {netip.MustParseAddrPort("10.245.0.1:80"), netip.MustParseAddrPort("10.245.0.2:80")},
		tracker.IPv6: {netip.MustParseAddrPort("[2001:db8::1]:80"), netip.MustParseAddrPort("[2001:db8::2]:80")},
	} {
		for _, key := range []virtualKey{{family: family, mark: 77}, {family: family, proto: inet.TCP, at: reals[1]}} {
			must.Do(t, k.addVirtual(key, virtual{scheduler: RoundRobin}))
			must.Do(t, k.addReal(key, real{at: reals[0], weight: 1}))
			for _, how := range []Forwarding{ForwardingGUE, ForwardingTunnel, ForwardingGRE, ForwardingDirect, ForwardingGUE, ForwardingTranslated} {
				want := real{at: reals[1], weight: 7, forwarding: how}
				if err := k.addReal(key, want); err != nil { // the second time it exists
					t.Errorf("%s, %v: %v", key, how, err)
				}
				found := map[netip.AddrPort]real{}
				if err := k.reals(key, func(r real) { found[r.at] = r }); err != nil {
					t.Error(err)
				}
				if found[reals[1]] != want || found[reals[0]].forwarding != ForwardingTranslated || len(found) != 2 {
					t.Errorf("%s: %+v, want %+v", key, found, want)
				}
			}
		}
	}
}

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
