package nfnl

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestMessagesAgainstLibrary compares an encoded message with the library's,
// github.com/vishvananda/netlink.
func TestMessagesAgainstLibrary(t *testing.T) {
	b := Begin([]byte("before"), unix.NFNL_SUBSYS_CTNETLINK, 2, unix.NLM_F_ACK, 77, unix.NFPROTO_IPV6)
	b = AppendBytes(b, 1, []byte("12345"))
	b = AppendString(b, 2, "abcd")
	b = AppendUint8(b, 3, 7)
	b = AppendUint16(b, 4, 0x1234)
	b = AppendUint32(b, 5, 0x12345678)
	b = AppendUint64(b, 6, 0x123456789abcdef0)
	start := len(b)
	b = BeginNested(b, 7)
	b = AppendUint32(b, 8, 9)
	EndNested(b, start)
	End(b, len("before"))

	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|2, unix.NLM_F_ACK)
	req.Seq = 77
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_IPV6, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(1, []byte("12345")))
	req.AddData(nl.NewRtAttr(2, nl.ZeroTerminated("abcd")))
	req.AddData(nl.NewRtAttr(3, nl.Uint8Attr(7)))
	req.AddData(nl.NewRtAttr(4, nl.BEUint16Attr(0x1234)))
	req.AddData(nl.NewRtAttr(5, nl.BEUint32Attr(0x12345678)))
	req.AddData(nl.NewRtAttr(6, nl.BEUint64Attr(0x123456789abcdef0)))
	nest := nl.NewRtAttr(7|unix.NLA_F_NESTED, nil)
	nest.AddRtAttr(8, nl.BEUint32Attr(9))
	req.AddData(nest)
	if want := req.Serialize(); !bytes.Equal(b[len("before"):], want) {
		t.Errorf("% x\nwant\n% x", b[len("before"):], want)
	}
}

func TestAnswersAreRead(t *testing.T) {
	refusal := func(errno unix.Errno, text string) []byte {
		b := begin(nil, typeError, 0, 5, 0, 0)[:headerLen]
		b = binary.NativeEndian.AppendUint32(b, uint32(-int32(errno)))
		b = append(b, make([]byte, headerLen)...)
		if text != "" {
			b = AppendString(b, attrMessage, text)
		}
		End(b, 0)
		return b
	}
	m, rest, err := Next(append(refusal(unix.EBUSY, "in use"), "xyz"...))
	if err != nil || string(rest) != "xyz" || m.Seq != 5 || !m.Last() || !m.Acknowledges() || m.Attrs() != nil {
		t.Fatalf("%+v, rest %q, error %v", m, rest, err)
	}
	var refused *Error
	if err := m.Err(); !errors.As(err, &refused) || refused.Errno != unix.EBUSY || refused.Message != "in use" || !errors.Is(err, unix.EBUSY) {
		t.Errorf("refusal: %v", err)
	}
	if got := (&Error{Errno: unix.EBUSY, What: "delete chain", Message: "in use"}).Error(); got != "delete chain: device or resource busy (in use)" {
		t.Errorf("error text %q", got)
	}
	if m, _, err := Next(refusal(0, "")); err != nil || m.Err() != nil {
		t.Errorf("acknowledgement: %v, %v", err, m.Err())
	}
	short := begin(nil, typeError, 0, 5, 0, 0)[:headerLen]
	End(short, 0)
	if m, _, err := Next(short); err != nil || !errors.Is(m.Err(), ErrMalformed) {
		t.Errorf("error without a number: %v, %v", err, m.Err())
	}
}

// FuzzAnswers reads answers of arbitrary bytes.
func FuzzAnswers(f *testing.F) {
	b := Begin(nil, unix.NFNL_SUBSYS_NFTABLES, 1, 0, 1, 0)
	b = AppendString(b, 1, "abc")
	End(b, 0)
	f.Add(b)
	f.Add(b[:headerLen-1])
	f.Add([]byte{0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		for left := data; len(left) > 0; {
			m, rest, err := Next(left)
			if err != nil {
				if !errors.Is(err, ErrMalformed) {
					t.Errorf("error %v", err)
				}
				return
			}
			if len(rest) >= len(left) {
				t.Fatal("Next made no progress")
			}
			left = rest
			_ = m.Err()
			n := 0
			for _, d := range Attributes(m.Attrs()) {
				n += len(d) + 4
				for range Attributes(d) {
				}
			}
			if n > len(m.Body)+3 {
				t.Errorf("%d bytes of attributes in %d", n, len(m.Body))
			}
		}
	})
}
