package conformance

import (
	"fmt"
	"net/netip"
	"time"
)

// Reach connects once from an external client and returns the server that responded.
// It returns an error if the connection is refused or gets no reply within the time.
// A UDP connection is one request with its reply, from a new port. Reach is safe for
// concurrent use.
func (w *World) Reach(to Target, wait time.Duration) (netip.AddrPort, error) {
	from := w.net.hosts["client1"]
	o := from.probe(w.tb.Context(), to.Protocol, to.Addr, wait)
	if o.kind != reached {
		return netip.AddrPort{}, fmt.Errorf("%s from %s to %s: %s", to.Protocol, from.name, to.Addr, o)
	}
	return o.server, nil
}
