package nfnl

import "slices"

// Types of messages (include/uapi/linux/netfilter/nfnetlink.h).
const (
	batchBegin = 0x10 // NFNL_MSG_BATCH_BEGIN
	batchEnd   = 0x11 // NFNL_MSG_BATCH_END
	nfTables   = 10   // NFNL_SUBSYS_NFTABLES
)

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
	of   Named
}

// Named is an object of the kernel.
type Named interface{ Name() string }

// Reset empties b and begins a transaction.
func (b *Batch) Reset() {
	b.buf, b.notes, b.seq = b.buf[:0], b.notes[:0], 0
	b.control(batchBegin)
}

// Len returns the batch's length in bytes so far.
func (b *Batch) Len() int { return len(b.buf) }

// Grow makes room for n more bytes.
func (b *Batch) Grow(n int) { b.buf = slices.Grow(b.buf, n) }

// Empty reports whether b holds no message.
func (b *Batch) Empty() bool { return b.seq <= 1 }

// Note labels the messages that follow, until the next Note. The label of a refused
// message is the field What of its [Error].
func (b *Batch) Note(what string) { b.NoteOf(what, nil) }

// NoteOf is like Note, with a label that ends with the name of an object, unless that is nil.
func (b *Batch) NoteOf(what string, object Named) {
	b.notes = append(b.notes, note{b.seq, what, object})
}

func (b *Batch) what(seq uint32) string {
	for _, n := range slices.Backward(b.notes) {
		switch {
		case n.seq > seq:
		case n.of != nil:
			return n.what + n.of.Name()
		default:
			return n.what
		}
	}
	return ""
}

func (b *Batch) control(typ uint16) {
	b.start = len(b.buf)
	b.buf = BeginControl(b.buf, typ, b.seq, nfTables)
	b.End()
	b.seq++
}

// Begin starts a message of an nf_tables type (NFT_MSG_*) with flags (NLM_F_*) in
// addition to NLM_F_REQUEST.
func (b *Batch) Begin(typ, flags uint16, family byte) {
	b.start = len(b.buf)
	b.buf = Begin(b.buf, nfTables, typ, flags, b.seq, family)
	b.seq++
}

// End ends the message that Begin started.
func (b *Batch) End() { End(b.buf, b.start) }

// String appends a NUL-terminated string attribute.
func (b *Batch) String(typ uint16, s string) { b.buf = AppendString(b.buf, typ, s) }

// Uint32 appends a big-endian 32-bit attribute.
func (b *Batch) Uint32(typ uint16, v uint32) { b.buf = AppendUint32(b.buf, typ, v) }

// Uint64 appends a big-endian 64-bit attribute.
func (b *Batch) Uint64(typ uint16, v uint64) { b.buf = AppendUint64(b.buf, typ, v) }

// Bytes appends an attribute of raw bytes.
func (b *Batch) Bytes(typ uint16, data []byte) { b.buf = AppendBytes(b.buf, typ, data) }

// Encoded appends encoded attributes.
func (b *Batch) Encoded(attrs []byte) { b.buf = append(b.buf, attrs...) }

// Nest starts an attribute that holds attributes; Unnest ends it.
func (b *Batch) Nest(typ uint16) {
	b.nest = append(b.nest, len(b.buf))
	b.buf = BeginNested(b.buf, typ)
}

// Unnest ends the attribute that Nest started.
func (b *Batch) Unnest() {
	last := len(b.nest) - 1
	EndNested(b.buf, b.nest[last])
	b.nest = b.nest[:last]
}

// Finish requests an acknowledgement of the last message (kernels before 6.10 do not acknowledge the end of a batch),
// ends the batch, and returns it. The caller must not add to b before the next Reset.
func (b *Batch) Finish() []byte {
	Acknowledge(b.buf, b.start)
	b.control(batchEnd)
	return b.buf
}
