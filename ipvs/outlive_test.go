//go:build linux

package ipvs

import (
	"context"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// testConnectionsOutliveTheirService keeps connections of a client and of a pod open while their
// Services lose external IPs and endpoints, are deleted and come back, while the agent restarts,
// and while another program removes what identifies a virtual server. No connection may be lost,
// and nothing may be left over in the end.
func testConnectionsOutliveTheirService(f *faultWorld) {
	t := f.t
	ctx := context.Background()
	tcp := func(to string) conformance.Target {
		return conformance.Target{Addr: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP}
	}
	tend := func() {
		t.Helper()
		if err := f.backend.tend(ctx, time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	tend()
	empty := f.kernel()
	set := func(i int, edits ...func(*v1.Service)) {
		s := slice(i, v1.ProtocolTCP)
		for _, p := range f.Pods() {
			port := int32(p.Ports()[0])
			s.Ports[0].Port = &port
			s.Endpoints = append(s.Endpoints, backendtest.Endpoint(p.Addr(tracker.IPv4).String(), p.Node))
		}
		f.Tracker.SetService(svc(i, edits...))
		f.Tracker.SetSlice(s)
	}
	remove := func(list ...int) {
		for _, i := range list {
			f.Tracker.DeleteService(svcName(i))
		}
	}
	all := func() {
		set(60, externalIPs("198.18.0.60"))
		set(61, externalIPs("198.18.0.61"), externalLocal)
		set(62, nodePort(30062), externalLocal)
	}
	all()
	f.Sync()
	targets := []conformance.Target{
		tcp("10.96.0.60:80"), tcp("198.18.0.60:80"), tcp("10.96.0.61:80"), tcp("198.18.0.61:80"), tcp("10.96.0.62:80"), tcp("192.0.2.1:30062"),
	}
	held := f.Hold(targets)
	marked := 0
	for k := range f.backend.states[0].virtuals {
		if k.mark != 0 {
			if err := f.backend.kernel.reals(k, func(r real) { marked += r.active }); err != nil {
				t.Fatal(err)
			}
		}
	}
	if marked == 0 {
		t.Error("no connection has a virtual server for internal traffic")
	}

	restart := func() {
		f.Cursor.Detach()
		f.backend.Close()
		b, err := New(ctx, Config{NetNS: f.Env.NetNS, Families: f.Env.Families})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		f.backend, f.Cursor = b, f.Engine.Attach("ipvs", b)
	}
	damage := func(command string) func() {
		return func() {
			f.run(command)
			f.Cursor.Resync()
		}
	}
	bare := func() { set(60); set(61); set(62) }
	// Another Service takes the addresses and ports, with other policies, and loses them.
	exchange := func() {
		set(63, externalIPs("198.18.0.61"))
		set(64, externalIPs("198.18.0.60"), externalLocal)
		f.Sync()
		f.Hold([]conformance.Target{tcp("198.18.0.61:80"), tcp("198.18.0.60:80")})
		tend()
		remove(63, 64)
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"Services lose their external IPs and NodePorts", bare},
		{"a restart", restart},
		{"other Services have the addresses", exchange},
		{"the sets are flushed", damage("ipset flush")},
		{"the device is deleted", damage("ip link del " + deviceName)},
		{"Services have their addresses again", all},
		{"Services are deleted", func() { remove(60, 61, 62) }},
		{"a second restart", restart},
		{"the sets are flushed while Services are gone", damage("ipset flush")},
		{"a third restart", restart},
		{"the device is deleted while Services are gone", damage("ip link del " + deviceName)},
		{"the sets are flushed, and Services have their addresses", func() { damage("ipset flush")(); all() }},
		{"the sets are flushed, and Services are deleted", func() { damage("ipset flush")(); remove(60, 61, 62) }},
	} {
		t.Logf("%s", step.name)
		step.do()
		f.Sync()
		tend()
		if err := f.backend.Check(ctx); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
		if err := held.Check(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
	}
	f.backend.config.DrainLimit = time.Minute
	tend()
	if left := f.kernel(); left != empty {
		t.Errorf("left over:\n%s", difference(left, empty))
	}
}
