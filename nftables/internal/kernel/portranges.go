package kernel

import (
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
)

// rangeChains are the chains for ranges of ports.
const rangeChains = `
chain range-firewall-check {
	ip saddr . ip daddr . meta l4proto . th dport @range-allowed-sources return
	drop
}
chain internal-ranges {
	meta priority set ip daddr . meta l4proto . th dport map @service-ranges meta priority set meta priority map @internal-range-keys meta priority & fff0:0 vmap @internal-handlers
}
chain own-ranges {
	meta priority set ip daddr . meta l4proto . th dport map @service-ranges meta priority set meta priority map @range-keys meta priority & fff0:0 vmap @own-handlers
}
chain ranges {
	meta priority set ip daddr . meta l4proto . th dport map @service-ranges meta priority set meta priority map @range-keys meta priority & fff0:0 vmap @handlers
}
`

// rangeStickyChains are the chains that the sticky handlers for ranges share, without counting.
const rangeStickyChains = `
chain range-sticky-send {
	meta l4proto { tcp, udp, sctp } dnat ip to meta priority map @sticky-endpoints ` + shiftsPort + ` meta priority & ffff:0 map @shift-from - meta priority & ffff:0 map @shift-to
	meta l4proto { tcp, udp, sctp } dnat ip to meta priority map @sticky-endpoints ` + keepsPort + `
}
chain range-sticky-confirm {
	` + recall + `
	goto range-sticky-send
}
`

// chainsForRanges returns the chains that an object for ranges of ports creates or rewrites.
func (w Rules) chainsForRanges(o *model.Object) []ChainSpec {
	switch o.Kind {
	case model.RangeStickyChains:
		return chainsIn(rangeStickyChains)
	case model.RangeChains:
		return chainsIn(rangeChains)
	case model.UseRanges, model.UnuseRanges:
		out := slices.DeleteFunc(w.fixed(), func(c ChainSpec) bool { return !layout.LeadsToRanges(c.Name) })
		for i := range out {
			out[i].Replaced = true
			if o.Kind == model.UseRanges {
				out[i].Rules = toRanges(out[i])
			}
		}
		return out
	}
	return nil
}

// toRanges returns the rules of a chain with those that look up ranges of ports. A range has
// its turn if the destination is no single port and no NodePort, whatever happens to packets to
// these.
func toRanges(c ChainSpec) []string {
	if c.Name != layout.ChainOwnServices {
		return append(c.Rules, "goto "+layout.ChainRanges)
	}
	// The rules before leave a dispatch key if the destination is a single port or a NodePort.
	last := len(c.Rules) - 1
	reset := c.Rules[last]
	return append(c.Rules[:last], reset+" return", "jump "+layout.ChainOwnRanges, reset)
}

// counting returns the rule that counts a packet to the handler in a set. Packets to ranges of ports are not counted: a
// counter for each port that some client tries would fill the set.
func counting(h layout.Handler, s layout.Set) []string {
	if h.Range {
		return nil
	}
	return []string{count(s)}
}

// keepsPort ends a rule for ranges of ports that translates the address alone. shiftsPort begins the end of
// one that shifts the port by the range that a pool has in the maps of shifts (see [layout.ShiftedBy]), for
// connections to a pool that has one. nft has no syntax for either, and reads comments.
const (
	keepsPort  = "# the port stays"
	shiftsPort = "# the port becomes"
)

// shiftsBy ends a rule that shifts the port. pool is the bits of the priority that have the pool.
func shiftsBy(pool string) string {
	return shiftsPort + " meta priority & " + pool + " map @shift-from - meta priority & " + pool + " map @shift-to"
}

// portsOf returns the ends of the rules that translate a connection to an endpoint, in the order of the rules.
func portsOf(h layout.Handler) []string {
	if h.Range {
		return []string{" " + shiftsBy("f:ffff"), " " + keepsPort}
	}
	return []string{""}
}
