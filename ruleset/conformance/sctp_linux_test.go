package conformance

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
)

func TestSCTPPacketsAreParsed(t *testing.T) {
	t.Parallel()
	for n := range 9 {
		cookie := []byte(strings.Repeat("x", n))
		b := sctpPacket(1234, 80, 7, chunkInitAck, 9, cookie)
		h, ok := parseSCTP(b)
		if !ok || h.from != 1234 || h.to != 80 || h.verification != 7 || h.tag != 9 ||
			h.chunk != chunkInitAck || string(h.cookie) != string(cookie) || len(b)%4 != 0 {
			t.Errorf("%d bytes: %+v, %v", n, h, ok)
		}
		b[1]++
		if _, ok := parseSCTP(b); ok {
			t.Errorf("%d bytes: a wrong checksum is accepted", n)
		}
	}
}

// FuzzSCTP looks for packets that make parseSCTP fail.
func FuzzSCTP(f *testing.F) {
	f.Add(sctpPacket(1, 2, 3, chunkInit, 4, nil))
	f.Add(sctpPacket(1, 2, 3, chunkInitAck, 4, []byte("cookie")))
	f.Add(sctpPacket(1, 2, 3, chunkInitAck, 4, nil)[:20])
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 12 {
			binary.LittleEndian.PutUint32(b[8:], sctpChecksum(b))
		}
		if h, ok := parseSCTP(b); ok && len(h.cookie) > len(b) {
			t.Errorf("%x: %+v", b, h)
		}
	})
}
