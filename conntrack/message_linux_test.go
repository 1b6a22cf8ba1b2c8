package conntrack

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/tracker"
)

// encode returns the message with which a kernel reports f.
func encode(f *Flow) []byte {
	b := nfnl.Begin(nil, unix.NFNL_SUBSYS_CTNETLINK, nl.IPCTNL_MSG_CT_NEW, 0, 1, inet.AF(tracker.FamilyOf(f.Dst.Addr())))
	b = tuple.Append(b, nl.CTA_TUPLE_ORIG, f.Protocol, f.Src, f.Dst)
	reply := len(b)
	b = tuple.Append(b, nl.CTA_TUPLE_REPLY, f.Protocol, f.ReplySrc, f.ReplyDst)
	if f.ReplyZone {
		b = nfnl.AppendUint16(b, 3 /* CTA_TUPLE_ZONE */, f.Zone)
		nfnl.EndNested(b, reply)
	}
	b = nfnl.AppendUint32(b, 3, 14) // CTA_STATUS, which decodeFlow ignores
	b = nfnl.AppendUint32(b, nl.CTA_ID, f.ID)
	if !f.ReplyZone {
		b = nfnl.AppendUint16(b, nl.CTA_ZONE, f.Zone)
	}
	nfnl.End(b, 0)
	return b
}

// attrs returns the attributes of an encoded flow.
func attrs(t testing.TB, f *Flow) []byte {
	t.Helper()
	m, rest, err := nfnl.Next(encode(f))
	if err != nil || len(rest) != 0 {
		t.Fatalf("%v, %d bytes left", err, len(rest))
	}
	return m.Attrs()
}

func TestEncodedFlowIsDecoded(t *testing.T) {
	for _, f := range []Flow{
		{Protocol: 17, Src: ap("10.9.0.1:1000"), Dst: ap("10.96.0.1:53"), ReplySrc: ap("10.0.0.1:5353"), ReplyDst: ap("10.9.0.2:2000"), ID: 1 << 31, Zone: 0x1234},
		{Protocol: 17, Src: ap("[fd09::1]:65535"), Dst: ap("[fd96::1]:53"), ReplySrc: ap("[fd00::1]:1"), ReplyDst: ap("[fd09::1]:65535")},
		{Protocol: 17, Src: ap("10.9.0.1:1000"), Dst: ap("10.96.0.1:53"), ReplySrc: ap("10.0.0.1:5353"), ReplyDst: ap("10.9.0.2:2000"), Zone: 7, ReplyZone: true},
	} {
		body := attrs(t, &f)
		var got Flow
		if err := decodeFlow(body, &got); err != nil || got != f {
			t.Errorf("got %+v, %v\nwant %+v", got, err, f)
		}
		// A cut message is an error, unless the cut follows all addresses.
		for n := range body {
			if err := decodeFlow(body[:n], &got); err != nil && !errors.Is(err, ErrMalformed) {
				t.Errorf("cut at %d: %v", n, err)
			} else if err == nil && n < len(body)-24 {
				t.Errorf("cut at %d: no error", n)
			}
		}
	}
}

func TestMalformedFlowsAreRejected(t *testing.T) {
	tuple := func(kind uint16, inner []byte) []byte {
		b := nfnl.BeginNested(nil, nl.CTA_TUPLE_ORIG)
		start := len(b)
		b = append(nfnl.BeginNested(b, kind), inner...)
		nfnl.EndNested(b, start)
		nfnl.EndNested(b, 0)
		return b
	}
	mixed := flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.1:53")
	mixed.ReplySrc = ap("[fd00::1]:53")
	for name, body := range map[string][]byte{
		"no attributes":      nil,
		"length 0":           {0, 0, 1, 0},
		"length too great":   {255, 255, 1, 0},
		"id alone":           nfnl.AppendUint32(nil, nl.CTA_ID, 1),
		"address of 3 bytes": tuple(nl.CTA_TUPLE_IP, nfnl.AppendBytes(nil, nl.CTA_IP_V4_SRC, []byte{1, 2, 3})),
		"two families":       attrs(t, &mixed),
	} {
		var f Flow
		if err := decodeFlow(body, &f); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v, %+v", name, err, f)
		}
	}
}

// FuzzDecode reads a buffer of messages as Dump does. Reading must end, and each decoded flow
// must survive encoding.
func FuzzDecode(f *testing.F) {
	four := flow("10.9.0.1:1000", "10.96.0.1:53", "10.0.0.1:5353")
	six := flow("[fd09::1]:1", "[fd96::1]:53", "[fd00::1]:53")
	f.Add(append(encode(&four), encode(&six)...))
	f.Add(dumpRequest(tracker.IPv6, []uint16{7}).Attrs)
	f.Add(appendDelete(nil, 1, &four))
	f.Add([]byte{})
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		var flow Flow
		for len(b) > 0 {
			m, rest, err := nfnl.Next(b)
			if err != nil {
				return
			}
			if len(rest) >= len(b) {
				t.Fatal("no progress")
			}
			b = rest
			_ = m.Err()
			if decodeFlow(m.Attrs(), &flow) != nil {
				continue
			}
			for _, a := range []netip.AddrPort{flow.Src, flow.Dst, flow.ReplySrc, flow.ReplyDst} {
				if !a.IsValid() {
					t.Fatalf("%+v", flow)
				}
			}
			again, _, err := nfnl.Next(encode(&flow))
			if err != nil {
				t.Fatal(err)
			}
			var got Flow
			if err := decodeFlow(again.Attrs(), &got); err != nil || got != flow {
				t.Fatalf("got %+v, %v\nwant %+v", got, err, flow)
			}
		}
	})
}
