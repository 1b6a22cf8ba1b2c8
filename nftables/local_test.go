//go:build linux

package nftables

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestNodeIsRefused sends from the node to a NodePort without endpoints. No packet
// reaches the node's own server at the port.
func TestNodeIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	own := backendtest.OwnServer(t, r.host)
	r.tracker.SetService(svc(0, nodePort(30080), overUDP))
	r.tracker.SetService(svc(1, nodePort(30080)))
	r.sync()
	backendtest.NodeIsRefused(t, r.host, own...)
}

// TestRefusedSocketIsForwardedLater has a NodePort refuse a socket on the node. As soon as the
// Service has an endpoint, the same socket reaches it.
func TestRefusedSocketIsForwardedLater(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	cleaner := must.Get(conntrack.New(t.Context(), conntrack.Config{NetNS: r.host.File()}))(t)
	defer cleaner.Close()
	r.cursor.Detach()
	r.cursor = r.engine.Attach("nftables", cleaner.Wrap(r.backend))
	own := backendtest.OwnServer(t, r.host)
	r.tracker.SetService(svc(0, nodePort(30080), overUDP))
	r.sync()
	exchange := backendtest.RefusedSockets(t, r.host, netip.AddrPortFrom(own[0], 30080), netip.AddrPortFrom(own[1], 30080))
	// The endpoint is another server on the node.
	for i, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r.host.ServeUDP(t, netip.AddrPortFrom(own[i], 8080).String(), f.String())
		es, proto := epSlice(0, f, 2), v1.ProtocolUDP
		es.Endpoints[0].Addresses[0], es.Ports[0].Protocol = own[i].String(), &proto
		r.tracker.SetSlice(es)
	}
	r.sync()
	must.Do(t, cleaner.Flush(t.Context()))
	for i, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		if got, err := exchange(i); got != f.String() || err != nil {
			t.Errorf("%v: %q, %v", f, got, err)
		}
	}
}
