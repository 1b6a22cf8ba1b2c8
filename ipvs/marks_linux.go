package ipvs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// markHooks holds the numbers of the chains' hooks.
var markHooks = map[string]uint32{"input": unix.NF_INET_LOCAL_IN, "output": unix.NF_INET_LOCAL_OUT}

func (c *ipsets) restoreMarks(wanted bool) error {
	batch := &nfnl.Batch{}
	batch.Reset()
	t := nfnl.Table{Batch: batch, Family: unix.NFPROTO_INET, Name: marksTable}
	t.Create() // so that it can be deleted
	t.Delete()
	if wanted {
		t.Create()
		for name, number := range markHooks {
			t.Chain(name, nfnl.Hook{Type: "filter", Number: number, Priority: markPriorities[name]})
			t.Rule(name, markRule())
		}
	}
	err := c.conn.Commit(batch)
	switch {
	case errors.Is(err, unix.EPERM):
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL):
		err = errors.Join(errors.ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("write table %s: %w", marksTable, err)
	}
	return nil
}

// markRule returns the expressions of
//
//	ct state new meta mark & 0x3000 == 0x3000 meta mark set meta mark & 0x3fff
func markRule() (encoded [][]byte) {
	number := func(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
	const stateNew = 1 << 3 // NF_CT_STATE_BIT(IP_CT_NEW)
	and := func(mask uint32) expr.Any {
		return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: number(mask), Xor: number(0)}
	}
	for _, e := range []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, and(stateNew),
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: number(0)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, and(markDrop),
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: number(markDrop)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, and(markBits),
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	} {
		b, err := expr.Marshal(unix.NFPROTO_INET, e)
		if err != nil {
			panic(err) // the expressions are the same in all processes
		}
		encoded = append(encoded, b)
	}
	return encoded
}

func (c *ipsets) marksRestored() error {
	for name := range markHooks {
		attrs := nfnl.AppendString(nfnl.AppendString(nil, unix.NFTA_CHAIN_TABLE, marksTable), unix.NFTA_CHAIN_NAME, name)
		rules := uint32(0)
		r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETCHAIN, Family: unix.NFPROTO_INET, Attrs: attrs}
		err := c.conn.Get(context.Background(), r, func(attrs []byte) error {
			for typ, data := range nfnl.Attributes(attrs) {
				if typ == unix.NFTA_CHAIN_USE {
					rules = nfnl.Uint32(data)
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("read chain %s of table %s: %w", name, marksTable, err)
		}
		if rules != 1 {
			return fmt.Errorf("chain %s of table %s has %d rules", name, marksTable, rules)
		}
	}
	return nil
}
