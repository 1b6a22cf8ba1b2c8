//go:build linux

package kernel

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// A connection to a sticky pool takes these chains. Only the chain of the sticky handler has the
// affinity timeout, and it looks up no map. So there may be thousands of such chains: the kernel
// checks each new element of a map against every rule that looks it up.
//
//	sticky          find the pool's handler
//	sticky-N-Ts     remember the client for T seconds; between the steps, jump to the others:
//	sticky-recall   find the client's last endpoint
//	choose-N        send to that endpoint if it is still in the pool, or else choose another
//	sticky-confirm  send to the endpoint that is remembered now

// toStickyHandler goes from the dispatch key of a sticky pool to the chain of its handler. It leaves
// the sticky key as the packet's dispatch key.
func (w Rules) toStickyHandler(handlers layout.Set) rule {
	r := rule(loadDispatch(layout.PoolMask)).with(found(layout.StickyPools), storeDispatch())
	return r.with(loadDispatch(layout.MaxMember)...).with(dispatch(handlers))
}

// stickyChain renders the chain of a sticky handler. A full set of clients ends the rules that
// remember a client, and the rules behind them send the connection all the same.
func (w Rules) stickyChain(h layout.StickyHandler) []rule {
	confirm := layout.ChainStickyConfirm
	if h.Range {
		confirm = layout.ChainRangeStickyConfirm
	}
	remember := w.client(unix.NFT_DYNSET_OP_UPDATE, h)
	return []rule{
		{jump(layout.ChainStickyRecall)},
		rule(hasMember()).with(remember...),
		{jump(h.Chooser())},
		remember,
		{gotoChain(confirm)},
	}
}

// stickyRecall replaces the handler in the sticky key by the number of the client's last endpoint,
// or by 0.
func (w Rules) stickyRecall() []rule { return []rule{w.onlyPool(), w.recall()} }

// stickyConfirm sends the connection to the endpoint that the client has by now. Another connection
// of the client may have been remembered first.
func (w Rules) stickyConfirm() []rule { return []rule{w.recall(), {gotoChain(layout.ChainStickySend)}} }

// stickySend sends the connection to the endpoint of the sticky key, if that exists. The first rule
// also counts the connection, and does nothing if the set of counters is full.
func (w Rules) stickySend() []rule {
	endpoint := rule(ofService()).with(load(expr.MetaKeyPRIORITY, firstReg), found(layout.StickyEndpoints))
	return []rule{endpoint.with(w.count(layout.Connections)...).with(w.dnat()), endpoint.with(w.dnat())}
}

// rangeStickySend does the same for ranges of ports, without counting.
func (w Rules) rangeStickySend() []rule {
	endpoint := rule(ofService()).with(load(expr.MetaKeyPRIORITY, firstReg), found(layout.StickyEndpoints))
	return []rule{endpoint.with(w.dnatShifted(layout.StickyMask)...), endpoint.with(w.dnatAddr())}
}

// stickyChooser sends the connection to the endpoint of the sticky key, if that exists. Otherwise
// it draws an endpoint, or finds it by a hash, and stores it in the sticky key.
func (w Rules) stickyChooser(h layout.StickyHandler) []rule {
	draw := func(n int) rule {
		bucket := []part{random(uint32(n))}
		if h.Hash != tracker.HashNone {
			bucket = w.hashed(h.Hash, uint32(n))
		}
		return rule(loadDispatch(layout.StickyMask)).with(bucket...).with(found(layout.StickyBuckets), storeDispatch())
	}
	send := layout.ChainStickySend
	if h.Range {
		send = layout.ChainRangeStickySend
	}
	out := []rule{
		rule(hasMember()).with(jump(send)),
		// The client is not remembered, or its endpoint is gone.
		w.client(dynsetDelete, layout.StickyHandler{}),
		w.onlyPool(),
	}
	// A draw of an empty bucket leaves the dispatch key as it was. A draw of another bucket
	// stores its endpoint's key, from whose pool the next rule draws again. So the draw that
	// always finds an endpoint comes first, and the draws with equal chances come last.
	if n := h.Buckets; n > layout.ExactBuckets && h.Hash == tracker.HashNone {
		out = append(out, draw(layout.BucketsBelow(n)), draw(n), draw(n), draw(n))
	}
	return append(out, draw(h.Buckets))
}

// clientKey loads the key of sticky-clients: the pool and the client's address.
func (w Rules) clientKey() rule { return append(loadDispatch(layout.StickyMask), w.saddr(firstReg+1)) }

// client remembers the client with the endpoint of the sticky key for the handler's timeout, or
// forgets it.
func (w Rules) client(op uint32, h layout.StickyHandler) rule {
	return w.clientKey().with(load(expr.MetaKeyPRIORITY, dynsetDataReg), of(&expr.Dynset{
		SetName: layout.StickyClients.Name(), SrcRegKey: firstReg, SrcRegData: dynsetDataReg,
		Operation: op, Timeout: h.Timeout(),
	}))
}

// recall stores the client's endpoint in the sticky key, if the client is remembered.
func (w Rules) recall() rule {
	return w.clientKey().with(found(layout.StickyClients), storeDispatch())
}

// onlyPool removes all but the pool from the sticky key.
func (w Rules) onlyPool() rule {
	return slices.Concat(loadDispatch(layout.StickyMask), rule{storeDispatch()})
}

// hasMember matches packets whose sticky key has the number of an endpoint.
func hasMember() []part {
	return under(layout.MaxMember, load(expr.MetaKeyPRIORITY, firstReg), differs(firstReg, word(0)))
}
