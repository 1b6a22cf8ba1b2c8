package nfnl

// Keys of the expression ct (enum nft_ct_keys in linux/netfilter/nf_tables.h).
const (
	CtProtoDst = 12 // NFT_CT_PROTO_DST
	CtDstIP    = 20 // NFT_CT_DST_IP
	CtDstIP6   = 22 // NFT_CT_DST_IP6
)

// OriginalCt returns the attributes of an expression (NFTA_EXPR_NAME and _DATA) that loads a part
// of a connection's original direction into a register. The tagged releases of
// github.com/google/nftables encode the direction with four bytes instead of one, and leave it
// out for CtDstIP and CtDstIP6, which the kernel then refuses.
func OriginalCt(key, register uint32) []byte {
	const (
		exprName, exprData     = 1, 2    // NFTA_EXPR_NAME, NFTA_EXPR_DATA
		ctDreg, ctKey, ctDirec = 1, 2, 3 // NFTA_CT_DREG, NFTA_CT_KEY, NFTA_CT_DIRECTION
		original               = 0       // IP_CT_DIR_ORIGINAL
	)
	b := AppendString(nil, exprName, "ct")
	start := len(b)
	b = BeginNested(b, exprData)
	b = AppendUint32(b, ctKey, key)
	b = AppendUint32(b, ctDreg, register)
	b = AppendUint8(b, ctDirec, original)
	EndNested(b, start)
	return b
}
