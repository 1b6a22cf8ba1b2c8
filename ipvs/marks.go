package ipvs

// marksTable is the table of nf_tables with the chains of restoreMarks. iptables has no chain
// between filter, where other programs' network policies set marks, and IPVS: iptables-nft gives
// the table security another priority than the kernel does.
const marksTable = "proxier-ipvs-marks"

// markPriorities holds the chains' places by hook: right before IPVS (ip_vs_ops4 of
// net/netfilter/ipvs/ip_vs_core.c).
var markPriorities = map[string]int32{"input": 97, "output": -99}
