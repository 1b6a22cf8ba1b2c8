package nft

import "github.com/go-proxier/proxier/internal/nfnl"

// Attributes of elements, their data and expressions (include/uapi/linux/netfilter/nf_tables.h:
// NFTA_SET_ELEM_*, NFTA_DATA_*, NFTA_VERDICT_*, NFTA_EXPR_DATA, NFTA_COUNTER_* and
// NFTA_LIST_ELEM).
const (
	elemKey        = 1
	elemData       = 2
	elemFlags      = 3
	elemTimeout    = 4
	elemExpiration = 5
	elemUserData   = 6
	elemExpr       = 7

	attrValue   = 1
	attrVerdict = 2

	verdictCode  = 1
	verdictChain = 2

	exprData       = 2
	counterPackets = 2

	listElem = 1
)

const (
	// flagNested marks the type of an attribute that holds attributes (linux/netlink.h, NLA_F_NESTED).
	flagNested = 1 << 15
	// intervalEnd is NFT_SET_ELEM_INTERVAL_END, and verdictGoto is NFT_GOTO.
	intervalEnd       = 1
	verdictGoto int32 = -4
)

type attributes [24][]byte

func parse(data []byte) (a attributes) {
	for typ, value := range nfnl.Attributes(data) {
		if int(typ) < len(a) {
			a[typ] = value
		}
	}
	return a
}

func (a *attributes) number(typ int) uint32 { return nfnl.Uint32(a[typ]) }
func (a *attributes) text(typ int) string   { return nfnl.String(a[typ]) }
