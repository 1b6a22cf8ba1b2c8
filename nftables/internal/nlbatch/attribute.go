//go:build linux

package nlbatch

import "encoding/binary"

// align is the length of n bytes with netlink's padding (NLA_ALIGNTO is 4).
func align(n int) int { return (n + 3) &^ 3 }

func appendHeader(buf []byte, typ uint16, n int) []byte {
	buf = binary.NativeEndian.AppendUint16(buf, uint16(4+n))
	return binary.NativeEndian.AppendUint16(buf, typ)
}

// padding ends a string and fills an attribute up to a multiple of four bytes.
const padding = "\x00\x00\x00\x00"

// AppendBytes appends an attribute of raw bytes to buf.
func AppendBytes(buf []byte, typ uint16, data []byte) []byte {
	buf = appendHeader(buf, typ, len(data))
	buf = append(buf, data...)
	return append(buf, padding[:align(len(data))-len(data)]...)
}

// AppendString appends an attribute of a NUL-terminated string to buf.
func AppendString(buf []byte, typ uint16, s string) []byte {
	buf = appendHeader(buf, typ, len(s)+1)
	buf = append(buf, s...)
	return append(buf, padding[:align(len(s)+1)-len(s)]...)
}

// AppendUint32 appends an attribute of a big-endian 32-bit number to buf.
func AppendUint32(buf []byte, typ uint16, v uint32) []byte {
	buf = appendHeader(buf, typ, 4)
	return binary.BigEndian.AppendUint32(buf, v)
}
