//go:build linux

package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// testWatchRetriesRefusedNodePorts adds addresses to the node while the kernel refuses an endpoint
// of a NodePort. The next Retire must try again, and Watch must not request a full delta.
func testWatchRetriesRefusedNodePorts(t *testing.T) {
	ctx := context.Background()
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.tracker.SetService(svc(1, nodePort(30001)))
	es := slice(1, v1.ProtocolTCP, -1, -2)
	es.Endpoints[1].Addresses = []string{"192.0.2.255"} // a broadcast address
	r.tracker.SetSlice(es)
	partial := func(err error) {
		t.Helper()
		var p *ruleset.PartialError
		if !errors.As(err, &p) || len(p.Failed) != 1 {
			t.Fatalf("%v, want one Service that failed", err)
		}
	}
	partial(r.cursor.Sync(ctx))
	add := func(addr string) virtualKey {
		t.Helper()
		r.run("ip addr add " + addr + "/32 dev eth0")
		return virtualKey{family: tracker.IPv4, proto: inet.TCP, at: netip.AddrPortFrom(netip.MustParseAddr(addr), 30001)}
	}
	add("192.0.2.70")
	partial(r.backend.tend(ctx, time.Now()))

	watching, stop := context.WithCancel(ctx)
	defer stop()
	drifts, ended := make(chan error, 100), make(chan error, 1)
	go func() { ended <- r.backend.Watch(watching, time.Hour, func(err error) { drifts <- err }) }()
	// When the second address is served, the call of Retire for the first has ended.
	for _, addr := range []string{"192.0.2.71", "192.0.2.72"} {
		k := add(addr)
		for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
			r.backend.mu.Lock()
			_, ok := r.backend.states[0].virtuals[k]
			r.backend.mu.Unlock()
			if ok {
				break
			}
			if time.Since(start) > testtime.Timeout {
				t.Fatalf("%s is not served", k)
			}
		}
	}
	r.has("ipvsadm -Sn", "-a -t 192.0.2.72:30001 -r 10.245.0.1:8080 -m -w 1")
	if len(drifts) != 0 {
		t.Errorf("Watch reported %v", <-drifts)
	}
	// Watch reports errors that need a full delta: another program deletes a virtual server
	// before its draining endpoint is removed.
	reported := false
	for n := 0; n < 10 && !reported; n++ {
		for i := range 2 {
			r.set(svc(2, over(v1.ProtocolUDP)), 2, -1-i)
			partial(r.cursor.Sync(ctx))
		}
		r.run("ipvsadm -C")
		select {
		case err := <-drifts:
			needFull(t, err, "Watch")
			reported = true
		case <-time.After(3 * time.Second):
			// Retire removed the endpoint before ipvsadm deleted its virtual server.
		}
	}
	if !reported {
		t.Error("Watch does not report a missing object")
	}
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch ended with %v", err)
	}
}
