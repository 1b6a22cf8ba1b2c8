//go:build linux

package nlbatch

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// maxMessage bounds one message of set elements: the length of the attribute
// that holds them is 16 bits.
const maxMessage = 60 << 10

// Batch is one nf_tables transaction that is being written. Reset begins it. A Batch
// keeps its memory between uses and is not safe for concurrent use.
type Batch struct {
	buf   []byte
	start int // of the message being written
	seq   uint32
	notes []note
	nest  []int
}

// note labels the messages from a sequence number on, for errors.
type note struct {
	seq  uint32
	what string
}

// Reset empties b and begins a transaction.
func (b *Batch) Reset() {
	b.buf, b.notes, b.seq = b.buf[:0], b.notes[:0], 0
	b.control(unix.NFNL_MSG_BATCH_BEGIN)
}

// Len returns the batch's length in bytes so far.
func (b *Batch) Len() int { return len(b.buf) }

// Grow makes room for n more bytes.
func (b *Batch) Grow(n int) { b.buf = slices.Grow(b.buf, n) }

// Empty reports whether b holds no message.
func (b *Batch) Empty() bool { return b.seq <= 1 }

// Note labels the messages that follow, until the next Note. The label of a refused
// message is the field What of its [nfnl.Error].
func (b *Batch) Note(what string) { b.notes = append(b.notes, note{b.seq, what}) }

func (b *Batch) what(seq uint32) string {
	for _, n := range slices.Backward(b.notes) {
		if n.seq <= seq {
			return n.what
		}
	}
	return ""
}

func (b *Batch) control(typ uint16) {
	b.start = len(b.buf)
	b.buf = nfnl.BeginControl(b.buf, typ, b.seq, unix.NFNL_SUBSYS_NFTABLES)
	b.End()
	b.seq++
}

// Begin starts a message of an nf_tables type (NFT_MSG_*) with flags (NLM_F_*) in
// addition to NLM_F_REQUEST.
func (b *Batch) Begin(typ, flags uint16, family byte) {
	b.start = len(b.buf)
	b.buf = nfnl.Begin(b.buf, unix.NFNL_SUBSYS_NFTABLES, typ, flags, b.seq, family)
	b.seq++
}

// End ends the message that Begin started.
func (b *Batch) End() { nfnl.End(b.buf, b.start) }

// String appends a NUL-terminated string attribute.
func (b *Batch) String(typ uint16, s string) { b.buf = nfnl.AppendString(b.buf, typ, s) }

// Uint32 appends a big-endian 32-bit attribute.
func (b *Batch) Uint32(typ uint16, v uint32) { b.buf = nfnl.AppendUint32(b.buf, typ, v) }

// Bytes appends an attribute of raw bytes.
func (b *Batch) Bytes(typ uint16, data []byte) { b.buf = nfnl.AppendBytes(b.buf, typ, data) }

// Nest starts an attribute that holds attributes; Unnest ends it.
func (b *Batch) Nest(typ uint16) {
	b.nest = append(b.nest, len(b.buf))
	b.buf = nfnl.BeginNested(b.buf, typ)
}

// Unnest ends the attribute that Nest started.
func (b *Batch) Unnest() {
	last := len(b.nest) - 1
	nfnl.EndNested(b.buf, b.nest[last])
	b.nest = b.nest[:last]
}

// Elements appends the messages that add (NFT_MSG_NEWSETELEM) or delete
// (NFT_MSG_DELSETELEM) the elements of one set that e holds.
func (b *Batch) Elements(typ, flags uint16, family byte, table, set string, e *Elements) {
	for part := range e.Parts(maxMessage) {
		b.Begin(typ, flags, family)
		b.String(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		b.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		b.buf = append(b.buf, part.buf...)
		b.Unnest()
		b.End()
	}
}

// finish asks for an acknowledgement of the last message and ends the batch.
// Kernels before 6.10 do not acknowledge the end of a batch.
func (b *Batch) finish() {
	nfnl.Acknowledge(b.buf, b.start)
	b.control(unix.NFNL_MSG_BATCH_END)
}
