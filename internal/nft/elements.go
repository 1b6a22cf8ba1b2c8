package nft

import (
	"encoding/binary"
	"iter"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Elements holds encoded elements of one set. The zero value is empty. Reset empties
// it and keeps its memory.
type Elements struct {
	buf []byte
	n   int
}

// Reset removes all elements.
func (e *Elements) Reset() { e.buf, e.n = e.buf[:0], 0 }

// Use makes e, which is empty, use the memory of buf.
func (e *Elements) Use(buf []byte) { e.buf = buf[:0] }

// Rest returns the memory behind the elements, and makes e not use it.
func (e *Elements) Rest() []byte {
	n := len(e.buf)
	rest := e.buf[n:]
	e.buf = e.buf[:n:n]
	return rest
}

// Append appends the elements that other holds.
func (e *Elements) Append(other *Elements) {
	e.buf = append(e.buf, other.buf...)
	e.n += other.n
}

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
		e.value(elemData, data)
	}
	if comment != "" {
		e.comment(comment)
	}
	e.close(at)
}

// AddTimed appends an element that expires. data is empty for an element of a set. timeout and expiration, the
// time left, are in the kernel's encoding, big-endian milliseconds. expiration may be empty.
func (e *Elements) AddTimed(key, data, timeout, expiration []byte) {
	at := e.open(key)
	if len(data) != 0 {
		e.value(elemData, data)
	}
	e.buf = nfnl.AppendBytes(e.buf, elemTimeout, timeout)
	if len(expiration) != 0 {
		e.buf = nfnl.AppendBytes(e.buf, elemExpiration, expiration)
	}
	e.close(at)
}

// AddCounter appends an element of a set with a counter, an expression in the kernel's
// encoding.
func (e *Elements) AddCounter(key, counter []byte) {
	at := e.open(key)
	e.buf = nfnl.AppendBytes(e.buf, elemExpr|flagNested, counter)
	e.close(at)
}

// AddVerdict appends an element of a verdict map with a goto to a chain.
func (e *Elements) AddVerdict(key []byte, chain string) {
	at := e.open(key)
	data := len(e.buf)
	e.buf = nfnl.BeginNested(e.buf, elemData)
	verdict := len(e.buf)
	e.buf = nfnl.BeginNested(e.buf, attrVerdict)
	code := verdictGoto
	e.buf = nfnl.AppendUint32(e.buf, verdictCode, uint32(code))
	e.buf = nfnl.AppendString(e.buf, verdictChain, chain)
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
	e.buf = nfnl.AppendUint32(e.buf, elemFlags, intervalEnd)
	e.close(at)
}

func (e *Elements) open(key []byte) int {
	at := len(e.buf)
	e.buf = nfnl.BeginNested(e.buf, listElem)
	e.value(elemKey, key)
	return at
}

func (e *Elements) close(at int) {
	nfnl.EndNested(e.buf, at)
	e.n++
}

func (e *Elements) value(typ uint16, v []byte) {
	e.buf = nfnl.AppendHeader(e.buf, typ|flagNested, 4+nfnl.Align(len(v)))
	e.buf = nfnl.AppendBytes(e.buf, attrValue, v)
}

// comment appends a comment in its Printable form.
func (e *Elements) comment(s string) {
	s = Printable(s)
	n := len(s) + 1
	e.buf = nfnl.AppendHeader(e.buf, elemUserData, 2+n)
	e.buf = append(e.buf, userDataComment, byte(n))
	e.buf = append(e.buf, s...)
	e.buf = append(e.buf, 0)
	for len(e.buf)%4 != 0 {
		e.buf = append(e.buf, 0)
	}
}

// Element is an element of a set or map as the kernel has it.
type Element struct {
	Key, Data []byte
	// Chain is the chain that an element of a verdict map leads to, and Goto reports whether the
	// verdict is a goto.
	Chain   string
	Goto    bool
	Comment string
	// IntervalEnd marks the first address behind an interval.
	IntervalEnd bool
	// Expr is the element's expression, nil if it has none.
	Expr []byte
	// Timeout and Expiration are in the kernel's encoding, nil if the element has none.
	Timeout, Expiration []byte
}

// Packets returns the number of packets of an element with a counter.
func (e *Element) Packets() uint64 { return e.counter(counterPackets) }

func (e *Element) counter(typ int) uint64 {
	expression := parse(e.Expr)
	values := parse(expression[exprData])
	return nfnl.Uint64(values[typ])
}

// Each calls fn with each element. The element is valid only during the call.
func (e *Elements) Each(fn func(Element)) {
	for _, one := range nfnl.Attributes(e.buf) {
		fn(ParseElement(one))
	}
}

// ParseElement returns the element that attributes of the kernel describe.
func ParseElement(attrs []byte) Element {
	a := parse(attrs)
	e := Element{
		Key: dataValue(a[elemKey]), Data: dataValue(a[elemData]),
		IntervalEnd: a.number(elemFlags)&intervalEnd != 0,
		Timeout:     a[elemTimeout], Expiration: a[elemExpiration],
		Expr:    a[elemExpr],
		Comment: Comment(a[elemUserData]),
	}
	if data := a[elemData]; data != nil && e.Data == nil {
		outer := parse(data)
		verdict := parse(outer[attrVerdict])
		e.Goto, e.Chain = int32(verdict.number(verdictCode)) == verdictGoto, verdict.text(verdictChain)
	}
	return e
}

// dataValue returns the value in a key or in data, or nil.
func dataValue(data []byte) (value []byte) {
	for typ, v := range nfnl.Attributes(data) {
		if typ == attrValue {
			value = v
		}
	}
	return value
}

// InterfaceName returns the key of an interface, which is also what rules compare a whole name
// with. It has IFNAMSIZ bytes (linux/if.h).
func InterfaceName(name string) []byte { return append([]byte(name), make([]byte, 16)...)[:16] }
