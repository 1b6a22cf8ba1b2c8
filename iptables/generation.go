//go:build linux

package iptables

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// generation asks the kernel how many transactions any process has committed to nf_tables
// in the network namespace so far. ok is false if that does not answer for all tables of
// the backend: with iptables-legacy, and if the kernel cannot be asked.
//
// iptables-nft-restore commits nothing if it only checks rules, so Check does not change
// the number.
func (b *Backend) generation(ctx context.Context) (gen uint32, ok bool) {
	if b.closed.Load() {
		return 0, false
	}
	for _, f := range b.families {
		if !f.tool.NFT() {
			return 0, false
		}
	}
	if b.questions == nil || b.questions.Closed() {
		conn, err := nfnl.Dial(b.ns.File())
		if err != nil {
			return 0, false
		}
		b.questions = conn
	}
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETGEN, Family: unix.AF_UNSPEC}
	err := b.questions.Get(ctx, r, func(attrs []byte) error {
		for typ, data := range nfnl.Attributes(attrs) {
			if typ == unix.NFTA_GEN_ID {
				gen, ok = nfnl.Uint32(data), true
			}
		}
		return nil
	})
	if err != nil {
		b.questions.Close()
		b.questions = nil
		return 0, false
	}
	return gen, ok
}
