//go:build linux

package kernel

import (
	"encoding/binary"
	"iter"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// Elements holds encoded elements of one set. The zero value is empty. Reset empties
// it and keeps its memory.
type Elements struct {
	buf []byte
	n   int
}

// Reset removes all elements.
func (e *Elements) Reset() { e.buf, e.n = e.buf[:0], 0 }

// Grow makes room for n more bytes.
func (e *Elements) Grow(n int) { e.buf = slices.Grow(e.buf, n) }

// Size returns the encoded length in bytes.
func (e *Elements) Size() int { return len(e.buf) }

// Count returns the number of elements.
func (e *Elements) Count() int { return e.n }

// Parts yields the elements in parts of at most limit bytes, but at least one element.
func (e *Elements) Parts(limit int) iter.Seq[*Elements] {
	return func(yield func(*Elements) bool) {
		for rest := e.buf; len(rest) > 0; {
			part := Elements{}
			n := 0
			for n < len(rest) {
				l := int(binary.NativeEndian.Uint16(rest[n:]))
				if n > 0 && n+l > limit {
					break
				}
				n += l
				part.n++
			}
			part.buf, rest = rest[:n], rest[n:]
			if !yield(&part) {
				return
			}
		}
	}
}

// Add appends an element. data is empty for an element of a set. comment may be "".
func (e *Elements) Add(key, data []byte, comment string) {
	at := e.open(key)
	if len(data) != 0 {
		e.value(unix.NFTA_SET_ELEM_DATA, data)
	}
	if comment != "" {
		e.comment(comment)
	}
	e.close(at)
}

// AddTimed appends an element of a map that expires. timeout and expiration, the time left,
// are in the kernel's encoding, big-endian milliseconds.
func (e *Elements) AddTimed(key, data, timeout, expiration []byte) {
	at := e.open(key)
	e.value(unix.NFTA_SET_ELEM_DATA, data)
	e.buf = nfnl.AppendBytes(e.buf, unix.NFTA_SET_ELEM_TIMEOUT, timeout)
	e.buf = nfnl.AppendBytes(e.buf, unix.NFTA_SET_ELEM_EXPIRATION, expiration)
	e.close(at)
}

// AddCounter appends an element of a set with a counter, an expression in the kernel's
// encoding.
func (e *Elements) AddCounter(key, counter []byte) {
	at := e.open(key)
	e.buf = nfnl.AppendBytes(e.buf, unix.NFTA_SET_ELEM_EXPR|unix.NLA_F_NESTED, counter)
	e.close(at)
}

// AddVerdict appends an element of a verdict map with a goto to a chain.
func (e *Elements) AddVerdict(key []byte, chain string) {
	at := e.open(key)
	data := len(e.buf)
	e.buf = nfnl.BeginNested(e.buf, unix.NFTA_SET_ELEM_DATA)
	verdict := len(e.buf)
	e.buf = nfnl.BeginNested(e.buf, unix.NFTA_DATA_VERDICT)
	code := int32(unix.NFT_GOTO)
	e.buf = nfnl.AppendUint32(e.buf, unix.NFTA_VERDICT_CODE, uint32(code))
	e.buf = nfnl.AppendString(e.buf, unix.NFTA_VERDICT_CHAIN, chain)
	nfnl.EndNested(e.buf, verdict)
	nfnl.EndNested(e.buf, data)
	e.close(at)
}

// AddInterval appends the two elements of an interval set that represent the addresses
// from first to the address before end. If end is empty, the interval has no end and takes
// one element.
func (e *Elements) AddInterval(first, end []byte) {
	e.close(e.open(first))
	if len(end) == 0 {
		return
	}
	at := e.open(end)
	e.buf = nfnl.AppendUint32(e.buf, unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	e.close(at)
}

// AddRange appends an element of a set of ranges of concatenations. data is empty for an element of
// a set. comment may be "".
func (e *Elements) AddRange(first, last, data []byte, comment string) {
	at := e.open(first)
	e.value(setElemAttrKeyEnd, last)
	if len(data) != 0 {
		e.value(unix.NFTA_SET_ELEM_DATA, data)
	}
	if comment != "" {
		e.comment(comment)
	}
	e.close(at)
}

func (e *Elements) open(key []byte) int {
	at := len(e.buf)
	e.buf = nfnl.BeginNested(e.buf, unix.NFTA_LIST_ELEM)
	e.value(unix.NFTA_SET_ELEM_KEY, key)
	return at
}

func (e *Elements) close(at int) {
	nfnl.EndNested(e.buf, at)
	e.n++
}

func (e *Elements) value(typ uint16, v []byte) {
	e.buf = nfnl.AppendHeader(e.buf, typ|unix.NLA_F_NESTED, 4+nfnl.Align(len(v)))
	e.buf = nfnl.AppendBytes(e.buf, unix.NFTA_DATA_VALUE, v)
}

// comment appends a comment in its Printable form.
func (e *Elements) comment(s string) {
	s = layout.Printable(s)
	n := len(s) + 1
	e.buf = nfnl.AppendHeader(e.buf, unix.NFTA_SET_ELEM_USERDATA, 2+n)
	e.buf = append(e.buf, layout.UserDataComment, byte(n))
	e.buf = append(e.buf, s...)
	e.buf = append(e.buf, 0)
	for len(e.buf)%4 != 0 {
		e.buf = append(e.buf, 0)
	}
}
