package kernel

import (
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// Element is an element of a set or map as the kernel has it.
type Element struct {
	Key, Data []byte
	// KeyEnd is the last key of a range of concatenations, nil for other elements.
	KeyEnd []byte
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

// Bytes returns the number of bytes of an element with a counter.
func (e *Element) Bytes() uint64 { return e.counter(counterBytes) }

func (e *Element) counter(typ int) uint64 {
	expression := parse(e.Expr)
	values := parse(expression[exprData])
	return nfnl.Uint64(values[typ])
}

// Each calls fn with each element. The element is valid only during the call.
func (e *Elements) Each(fn func(Element)) {
	for _, one := range nfnl.Attributes(e.buf) {
		fn(parseElement(one))
	}
}

func parseElement(attrs []byte) Element {
	a := parse(attrs)
	e := Element{
		Key: dataValue(a[elemKey]), Data: dataValue(a[elemData]), KeyEnd: dataValue(a[elemKeyEnd]),
		IntervalEnd: a.number(elemFlags)&intervalEnd != 0,
		Timeout:     a[elemTimeout], Expiration: a[elemExpiration],
		Expr:    a[elemExpr],
		Comment: layout.Comment(a[elemUserData]),
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
