package ipvs

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// serviceMessage returns a message about a virtual server as the kernel writes it, with its counters
// (connections, packets and bytes in and out) in 32 and in 64 bits.
func serviceMessage(k virtualKey, stats [5]uint64) []byte {
	native := binary.NativeEndian
	b := make([]byte, 4)
	service := len(b)
	b = nfnl.BeginNested(b, attrService)
	b = nfnl.AppendBytes(b, serviceFamily, native.AppendUint16(nil, uint16(inet.AF(k.family))))
	if k.mark != 0 {
		b = nfnl.AppendNative32(b, serviceMark, k.mark)
	} else {
		b = nfnl.AppendBytes(b, serviceProtocol, native.AppendUint16(nil, uint16(k.proto)))
		address := make([]byte, 16)
		copy(address, k.at.Addr().AsSlice())
		b = nfnl.AppendBytes(b, serviceAddress, address)
		b = nfnl.AppendUint16(b, servicePort, k.at.Port())
	}
	b = nfnl.AppendString(b, 6, "rr") // IPVS_SVC_ATTR_SCHED_NAME
	nested := len(b)
	b = nfnl.BeginNested(b, 10) // IPVS_SVC_ATTR_STATS
	for i, n := range stats {
		if i < 3 {
			b = nfnl.AppendNative32(b, uint16(i+1), uint32(n))
		} else {
			b = nfnl.AppendBytes(b, uint16(i+1), native.AppendUint64(nil, n))
		}
	}
	nfnl.EndNested(b, nested)
	nested = len(b)
	b = nfnl.BeginNested(b, 12)
	for i, n := range stats {
		b = nfnl.AppendBytes(b, 11, nil) // IPVS_STATS_ATTR_PAD
		b = nfnl.AppendBytes(b, uint16(i+1), native.AppendUint64(nil, n))
	}
	nfnl.EndNested(b, nested)
	nfnl.EndNested(b, service)
	return b
}

func TestCountersBeyond32Bits(t *testing.T) {
	t.Parallel()
	const much = 1 << 32
	stats := [5]uint64{much + 1, 2*much + 2, much + 3, 7 * much, 5}
	want := dataplane.Counters{Connections: much + 1, Packets: 3*much + 5, Bytes: 7*much + 5}
	for _, k := range []virtualKey{
		{family: tracker.IPv4, proto: inet.UDP, at: netip.MustParseAddrPort("10.96.0.1:53")},
		{family: tracker.IPv6, proto: inet.TCP, at: netip.MustParseAddrPort("[fd00::1]:80")},
		{family: tracker.IPv6, mark: 7},
	} {
		m := serviceMessage(k, stats)
		if got, c, ok := statisticsOf(m); !ok || got != k || c != want {
			t.Errorf("%v: got %v %+v %v, want %+v", k, got, c, ok, want)
		}
		for n := range m {
			statisticsOf(m[:n]) // must not panic
		}
	}
	if _, _, ok := statisticsOf(make([]byte, 4)); ok {
		t.Error("a message about no virtual server has counters")
	}
}
