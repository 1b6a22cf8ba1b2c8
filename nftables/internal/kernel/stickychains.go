package kernel

import (
	"fmt"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// A connection to a sticky pool takes these chains. Only the chain of the sticky handler has the affinity timeout,
// and it looks up no map, so there may be thousands: the kernel checks each new element of a map against every rule
// that looks it up.
//
//	sticky          find the pool's handler, and leave the sticky key as the packet's dispatch key
//	sticky-N-Ts     remember the client for T seconds; between the steps, jump to the others:
//	sticky-recall   find the client's last endpoint
//	choose-N        send to that endpoint if it is still in the pool, or else choose another
//	sticky-confirm  send to the endpoint that is remembered now

// stickyChains are the chains that all sticky handlers share. sticky-send sends the connection to the endpoint of the
// sticky key, if that exists. Its first rule also counts the connection, and does nothing if the set of counters is
// full. sticky-recall replaces the handler in the sticky key by the number of the client's last endpoint, or by 0.
// sticky-confirm sends the connection to the endpoint that the client has by now: another connection of the client
// may have been first.
const stickyChains = `
chain sticky-send {
	meta l4proto { tcp, udp, sctp } update @connections { ip daddr . meta l4proto . th dport counter } dnat ip to meta priority map @sticky-endpoints
	meta l4proto { tcp, udp, sctp } dnat ip to meta priority map @sticky-endpoints
}
chain sticky-recall {
	` + onlyPool + `
	` + recall + `
}
chain sticky-confirm {
	` + recall + `
	goto sticky-send
}
`

const (
	// onlyPool removes all but the pool from the sticky key.
	onlyPool = `meta priority set meta priority & ffff:0`
	// recall stores the client's endpoint in the sticky key, if the client is remembered.
	recall = `meta priority set meta priority & ffff:0 . ip saddr map @sticky-clients`
	forget = `delete @sticky-clients { meta priority & ffff:0 . ip saddr : meta priority }`
	// hasMember matches packets whose sticky key has the number of an endpoint.
	hasMember = `meta priority & 0:ffff != none`
)

// stickyChain renders the chain of a sticky handler. If the set of clients is full, the connection is sent all the
// same.
func stickyChain(h layout.StickyHandler) []string {
	remember := fmt.Sprintf("update @sticky-clients { meta priority & ffff:0 . ip saddr timeout %ds : meta priority }", h.Seconds)
	return []string{
		"jump " + layout.ChainStickyRecall,
		hasMember + " " + remember,
		"jump " + h.Chooser(),
		remember,
		"goto " + layout.ChainStickyConfirm,
	}
}

// stickyChooser sends the connection to the endpoint of the sticky key, if that exists. Otherwise it draws an
// endpoint, or finds it by a hash, and stores it in the sticky key.
func (w Rules) stickyChooser(h layout.StickyHandler) []string {
	choose := func(bucket string) string {
		return "meta priority set meta priority & ffff:0 . " + bucket + " map @sticky-buckets"
	}
	// After the first rule, the client is not remembered, or its endpoint is gone.
	out := []string{hasMember + " jump " + layout.ChainStickySend, forget, onlyPool}
	n := h.Buckets
	if h.Hash != tracker.HashNone {
		return append(out, choose(w.hashed(h.Hash, n)))
	}
	// A draw of an empty bucket leaves the dispatch key as it was, and another stores its endpoint's key, from whose
	// pool the next rule draws again. So the draw that always finds an endpoint comes first.
	if n > layout.ExactBuckets {
		out = append(out, choose(drawn(layout.BucketsBelow(n))), choose(drawn(n)), choose(drawn(n)), choose(drawn(n)))
	}
	return append(out, choose(drawn(n)))
}
