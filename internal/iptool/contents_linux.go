package iptool

import (
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

// expressions are the expressions of nf_tables of which iptables-nft makes rules.
var expressions = []string{"match", "target", "payload", "meta", "cmp", "bitwise", "range", "lookup", "limit", "counter", "immediate"}

// ReadContents reads a table of nf_tables in the network namespace of the tools.
func (t *Tool) ReadContents(ctx context.Context, table string) (Contents, error) {
	conn, err := nfnl.Dial(t.config.Namespace.File())
	if err != nil {
		return Contents{}, err
	}
	defer conn.Close()
	return nfnl.Whole(ctx, nfnl.ErrInterrupted, func() (Contents, error) {
		return readContents(ctx, conn, t.config.Family, table)
	})
}

func readContents(ctx context.Context, conn *nfnl.Conn, f tracker.Family, table string) (c Contents, err error) {
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Family: inet.AF(f), Dump: true}
	r.Type = unix.NFT_MSG_GETCHAIN // the kernel returns the chains of all tables
	err = conn.Get(ctx, r, func(chain []byte) error {
		if nfnl.String(attribute(chain, unix.NFTA_CHAIN_TABLE)) == table {
			c.Chains = append(c.Chains, nfnl.String(attribute(chain, unix.NFTA_CHAIN_NAME)))
		}
		return nil
	})
	if err != nil {
		return c, err
	}
	r.Type, r.Attrs = unix.NFT_MSG_GETRULE, nfnl.AppendString(nil, unix.NFTA_RULE_TABLE, table)
	return c, conn.Get(ctx, r, func(rule []byte) error {
		if nfnl.String(attribute(rule, unix.NFTA_RULE_TABLE)) != table {
			return nil // old kernels return the rules of all tables
		}
		chain := nfnl.String(attribute(rule, unix.NFTA_RULE_CHAIN))
		for _, expr := range nfnl.Attributes(attribute(rule, unix.NFTA_RULE_EXPRESSIONS)) {
			name := nfnl.String(attribute(expr, unix.NFTA_EXPR_NAME))
			sets := name == "meta" && attribute(expr, unix.NFTA_EXPR_DATA, unix.NFTA_META_SREG) != nil
			if c.Foreign == "" && (sets || !slices.Contains(expressions, name)) {
				c.Foreign = chain
			}
			to := attribute(expr, unix.NFTA_EXPR_DATA, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT, unix.NFTA_VERDICT_CHAIN)
			if name == "immediate" && to != nil {
				c.Jumps = append(c.Jumps, Jump{chain, nfnl.String(to)})
			}
		}
		return nil
	})
}

// attribute returns the data of an attribute, of one that is nested in it, and so on, or nil.
func attribute(attrs []byte, types ...uint16) []byte {
	for _, want := range types {
		data := attrs
		attrs = nil
		for typ, d := range nfnl.Attributes(data) {
			if typ == want {
				attrs = d
				break
			}
		}
	}
	return attrs
}
