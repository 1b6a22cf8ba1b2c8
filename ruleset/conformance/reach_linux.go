package conformance

import (
	"fmt"
	"net/netip"
	"time"
)

// Reach connects once, from a client outside, and returns the server that has
// answered. The error says what became of the connection otherwise, within the time:
// it was refused, or has had no answer. Over UDP it is one request and its answer,
// from a new port. It may be called by any goroutine.
func (w *World) Reach(to Target, wait time.Duration) (netip.AddrPort, error) {
	from := w.net.hosts["client1"]
	o := from.probe(w.tb.Context(), to.Protocol, to.Addr, wait)
	if o.kind != reached {
		return netip.AddrPort{}, fmt.Errorf("%s from %s to %s: %s", to.Protocol, from.name, to.Addr, o)
	}
	return o.server, nil
}
