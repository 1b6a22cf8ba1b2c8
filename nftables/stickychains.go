//go:build linux

package nftables

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

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
func (w rules) toStickyHandler() rule {
	r := rule(loadDispatch(poolMask)).with(found(setStickyPools), storeDispatch())
	return r.with(loadDispatch(maxMember)...).with(dispatch(setStickyHandlers))
}

// stickyChain renders the chain of a sticky handler. A full set of clients ends the rules that
// remember a client, and the rules behind them send the connection all the same.
func (w rules) stickyChain(h stickyHandler) []rule {
	remember := w.client(unix.NFT_DYNSET_OP_UPDATE, h)
	return []rule{
		{jump(chainStickyRecall)},
		rule(hasMember()).with(remember...),
		{jump(h.chooser())},
		remember,
		{gotoChain(chainStickyConfirm)},
	}
}

// stickyRecall replaces the handler in the sticky key by the number of the client's last endpoint,
// or by 0.
func (w rules) stickyRecall() []rule { return []rule{w.onlyPool(), w.recall()} }

// stickyConfirm sends the connection to the endpoint that the client has by now. Another connection
// of the client may have been remembered first.
func (w rules) stickyConfirm() []rule { return []rule{w.recall(), {gotoChain(chainStickySend)}} }

// stickySend sends the connection to the endpoint of the sticky key, if that exists. The first rule
// also counts the connection, and does nothing if the set of counters is full.
func (w rules) stickySend() []rule {
	endpoint := rule{load(expr.MetaKeyPRIORITY, firstReg), found(setStickyEndpoints)}
	return []rule{endpoint.with(w.count(setConnections)...).with(w.dnat()), endpoint.with(w.dnat())}
}

// stickyChooser sends the connection to the endpoint of the sticky key, if that exists. Otherwise
// it draws an endpoint, or finds it by a hash, and stores it in the sticky key.
func (w rules) stickyChooser(h stickyHandler) []rule {
	draw := func(n int) rule {
		bucket := []part{random(uint32(n))}
		if h.hash != tracker.HashNone {
			bucket = w.hashed(h.hash, uint32(n))
		}
		return rule(loadDispatch(stickyMask)).with(bucket...).with(found(setStickyBuckets), storeDispatch())
	}
	out := []rule{
		rule(hasMember()).with(jump(chainStickySend)),
		// The client is not remembered, or its endpoint is gone.
		w.client(dynsetDelete, stickyHandler{}),
		w.onlyPool(),
	}
	// A draw of an empty bucket leaves the dispatch key as it was. A draw of another bucket
	// stores its endpoint's key, from whose pool the next rule draws again. So the draw that
	// always finds an endpoint comes first, and the draws with equal chances come last.
	if n := h.buckets; n > exactBuckets && h.hash == tracker.HashNone {
		out = append(out, draw(bucketsBelow(n)), draw(n), draw(n), draw(n))
	}
	return append(out, draw(h.buckets))
}

// clientKey loads the key of sticky-clients: the pool and the client's address.
func (w rules) clientKey() rule { return append(loadDispatch(stickyMask), w.saddr(firstReg+1)) }

// client remembers the client with the endpoint of the sticky key for the handler's timeout, or
// forgets it.
func (w rules) client(op uint32, h stickyHandler) rule {
	return w.clientKey().with(load(expr.MetaKeyPRIORITY, dynsetDataReg), of(&expr.Dynset{
		SetName: setStickyClients.name(), SrcRegKey: firstReg, SrcRegData: dynsetDataReg,
		Operation: op, Timeout: h.timeout(),
	}))
}

// recall stores the client's endpoint in the sticky key, if the client is remembered.
func (w rules) recall() rule {
	return w.clientKey().with(found(setStickyClients), storeDispatch())
}

// onlyPool removes all but the pool from the sticky key.
func (w rules) onlyPool() rule { return slices.Concat(loadDispatch(stickyMask), rule{storeDispatch()}) }

// hasMember matches packets whose sticky key has the number of an endpoint.
func hasMember() []part {
	return under(maxMember, load(expr.MetaKeyPRIORITY, firstReg), differs(firstReg, word(0)))
}
