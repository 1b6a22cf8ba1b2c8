package kernel

import "github.com/google/nftables/expr"

// portOfRange reads the end of a rule for ranges of ports, if there is one, and returns the flags of the
// translation.
func (c *compiler) portOfRange(nat *expr.NAT) (flags byte, ok bool) {
	switch {
	case c.Accept(keepsPort):
		return 0, true
	case c.Accept(shiftsPort):
		nat.RegProtoMin, nat.RegProtoMax = spareReg, spareReg+1
		c.value(nat.RegProtoMin)
		c.need("-")
		c.value(nat.RegProtoMax)
		nat.Specified = true // so that there are flags
		return natOffset, true
	}
	return 0, false
}

// natOffset is NF_NAT_RANGE_PROTO_OFFSET of linux/netfilter/nf_nat.h, which
// github.com/google/nftables lacks.
const natOffset = 1 << 5
