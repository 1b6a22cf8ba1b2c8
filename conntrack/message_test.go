package conntrack

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// encode makes the message with which a kernel reports f.
func encode(f *Flow) []byte {
	b := beginMessage(nil, ctNew, 0, 1, afOf(tracker.FamilyOf(f.Dst.Addr())))
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.Src, f.Dst)
	b = appendTuple(b, ctaTupleReply, f.Protocol, f.ReplySrc, f.ReplyDst)
	b = appendAttr(b, 3, 0, 0, 0, 14) // CTA_STATUS, which is passed over
	b = appendAttr(b, ctaID, byte(f.ID>>24), byte(f.ID>>16), byte(f.ID>>8), byte(f.ID))
	b = appendAttr(b, ctaZone, byte(f.Zone>>8), byte(f.Zone))
	return endMessage(b, 0)
}

func TestDecodeFlow(t *testing.T) {
	for _, f := range []Flow{
		{Protocol: 17, Src: ap("10.9.0.1:1000"), Dst: ap("10.96.0.1:53"), ReplySrc: ap("10.0.0.1:5353"), ReplyDst: ap("10.9.0.2:2000"), ID: 1 << 31, Zone: 0x1234},
		{Protocol: 17, Src: ap("[fd09::1]:65535"), Dst: ap("[fd96::1]:53"), ReplySrc: ap("[fd00::1]:1"), ReplyDst: ap("[fd09::1]:65535")},
	} {
		m, rest, err := nextMessage(encode(&f))
		if err != nil || len(rest) != 0 || m.kind != ctNew || m.seq != 1 {
			t.Fatalf("%+v, %v, %v", m, rest, err)
		}
		var got Flow
		if err := decodeFlow(m.body, &got); err != nil || got != f {
			t.Errorf("got %+v, %v\nwant %+v", got, err, f)
		}
		// No cut is understood but where an attribute ends that may be missing.
		for n := range m.body {
			if err := decodeFlow(m.body[:n], &got); err != nil && !errors.Is(err, ErrMalformed) {
				t.Errorf("cut at %d: %v", n, err)
			} else if err == nil && n < len(m.body)-24 {
				t.Errorf("cut at %d: understood", n)
			}
		}
	}
}

func TestMalformed(t *testing.T) {
	header := []byte{afInet, 0, 0, 0}
	tuple := func(f func([]byte) []byte) []byte {
		return appendNested(append([]byte(nil), header...), ctaTupleOrig, f)
	}
	for name, body := range map[string][]byte{
		"empty":            nil,
		"no attributes":    header,
		"length 0":         append(append([]byte(nil), header...), 0, 0, 1, 0),
		"length 3":         append(append([]byte(nil), header...), native.AppendUint16(nil, 3)[0], native.AppendUint16(nil, 3)[1], 0, 0),
		"length too great": append(append([]byte(nil), header...), 255, 255, 1, 0),
		"id of 2 bytes":    appendAttr(append([]byte(nil), header...), ctaID, 1, 2),
		"zone of 4 bytes":  appendAttr(append([]byte(nil), header...), ctaZone, 1, 2, 3, 4),
		"address of 3 bytes": tuple(func(b []byte) []byte {
			return appendNested(b, ctaTupleIP, func(b []byte) []byte { return appendAttr(b, ctaIPv4Src, 1, 2, 3) })
		}),
		"port of 1 byte": tuple(func(b []byte) []byte {
			return appendNested(b, ctaTupleProto, func(b []byte) []byte { return appendAttr(b, ctaProtoSrcPort, 1) })
		}),
		"protocol of 2 bytes": tuple(func(b []byte) []byte {
			return appendNested(b, ctaTupleProto, func(b []byte) []byte { return appendAttr(b, ctaProtoNum, 1, 2) })
		}),
		"two families": func() []byte {
			f := flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.1:53")
			f.ReplySrc = ap("[fd00::1]:53")
			return encode(&f)[nlmHeaderLen:]
		}(),
	} {
		var f Flow
		if err := decodeFlow(body, &f); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v, %+v", name, err, f)
		}
	}
	for name, b := range map[string][]byte{
		"short": make([]byte, 15), "length 0": make([]byte, 16), "too long": endMessage(make([]byte, 16), -0)[:15],
	} {
		if _, _, err := nextMessage(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (message{kind: nlmError}).err(); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	if err := (message{kind: nlmDone}).err(); err != nil {
		t.Error(err)
	}
}

// TestDumpEnds: how a dump can end, as the kernel says it.
func TestDumpEnds(t *testing.T) {
	f := flow("10.9.0.1:1000", "10.96.0.1:53", "10.0.0.1:5353")
	tcp := f
	tcp.Protocol = 6
	errno := func(n int32) []byte { return native.AppendUint32(nil, uint32(-n)) }
	for _, c := range []struct {
		name  string
		flags uint16 // of the first flow
		end   message
		want  error
	}{
		{"done", 0, message{kind: nlmDone, body: errno(0)}, nil},
		{"done, of old kernels", 0, message{kind: nlmDone}, nil},
		{"interrupted", flagDumpIntr, message{kind: nlmDone, body: errno(0)}, ErrIncomplete},
		{"interrupted at the end", 0, message{kind: nlmDone, flags: flagDumpIntr, body: errno(0)}, ErrIncomplete},
		{"interrupted by a signal", 0, message{kind: nlmDone, body: errno(int32(syscall.EINTR))}, ErrIncomplete},
		{"failed at the end", 0, message{kind: nlmDone, body: errno(int32(syscall.ENOMEM))}, syscall.ENOMEM},
		{"refused", 0, message{kind: nlmError, body: errno(int32(syscall.EPERM))}, syscall.EPERM},
	} {
		seen := 0
		d := dump{see: func(*Flow) { seen++ }}
		for _, f := range []Flow{f, tcp} {
			last, err := d.take(message{kind: ctNew, flags: c.flags, body: encode(&f)[nlmHeaderLen:]})
			if last || err != nil {
				t.Errorf("%s: %v, %v", c.name, last, err)
			}
		}
		last, err := d.take(c.end)
		if err = d.result(err); !last || !errors.Is(err, c.want) || c.want == nil && err != nil || seen != 1 {
			t.Errorf("%s: %v, %v, %d flows", c.name, last, err, seen)
		}
	}
}

// FuzzDecode reads a buffer of messages as Dump does. Whatever is in it, it ends,
// and what is understood is a flow that can be sent back.
func FuzzDecode(f *testing.F) {
	four := flow("10.9.0.1:1000", "10.96.0.1:53", "10.0.0.1:5353")
	six := flow("[fd09::1]:1", "[fd96::1]:53", "[fd00::1]:53")
	f.Add(append(encode(&four), encode(&six)...))
	f.Add(dumpRequest(1, tracker.IPv6, []uint16{7}))
	f.Add(appendDelete(nil, 1, &four))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var flow Flow
		for len(b) > 0 {
			m, rest, err := nextMessage(b)
			if err != nil {
				return
			}
			if len(rest) >= len(b) {
				t.Fatal("no progress")
			}
			b = rest
			_ = m.err()
			if decodeFlow(m.body, &flow) != nil {
				continue
			}
			for _, a := range []netip.AddrPort{flow.Src, flow.Dst, flow.ReplySrc, flow.ReplyDst} {
				if !a.IsValid() {
					t.Fatalf("%+v", flow)
				}
			}
			again, _, err := nextMessage(encode(&flow))
			if err != nil {
				t.Fatal(err)
			}
			var got Flow
			if err := decodeFlow(again.body, &got); err != nil || got != flow {
				t.Fatalf("got %+v, %v\nwant %+v", got, err, flow)
			}
		}
	})
}
