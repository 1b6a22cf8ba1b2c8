//go:build linux

package kernel

import (
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// maxMessage bounds one message of set elements: the length of the attribute
// that holds them is 16 bits.
const maxMessage = 60 << 10

// Batch is one nf_tables transaction that is being written.
type Batch struct{ nfnl.Batch }

// Elements appends the messages that add (NFT_MSG_NEWSETELEM) or delete
// (NFT_MSG_DELSETELEM) the elements of one set that e holds.
func (b *Batch) Elements(typ, flags uint16, family byte, table, set string, e *Elements) {
	for part := range e.Parts(maxMessage) {
		b.Begin(typ, flags, family)
		b.String(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		b.String(unix.NFTA_SET_ELEM_LIST_SET, set)
		b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		b.Encoded(part.buf)
		b.Unnest()
		b.End()
	}
}
