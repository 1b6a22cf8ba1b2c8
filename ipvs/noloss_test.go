//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// testFloodLosesNothing changes hundreds of objects a second while clients connect. No
// connection may fail, and memory must stay bounded. Then it replaces the endpoints one after
// the other, and passes all objects to the tracker again, which must write nothing.
func testFloodLosesNothing(f *faultWorld) {
	t, services := f.t, *crowd
	for i := range services {
		f.Tracker.SetService(svc(1000 + i))
		f.Tracker.SetSlice(slice(1000+i, v1.ProtocolTCP, -1-i, -200, -300))
	}
	f.Sync()
	syncs, failures := 0, 0
	var slowest time.Duration
	r, err := runner.New(runner.Config{Min: 50 * time.Millisecond, Retry: time.Second, Max: time.Hour, Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) {
		syncs++
		if i.Triggers > 0 {
			slowest = max(slowest, i.Start.Add(i.Duration).Sub(i.QueuedAt))
		}
		if i.Err != nil {
			failures++
			t.Error(i.Err)
		}
	}}}, func(context.Context) error {
		// A started sync must end, so it does not use the runner's context.
		ctx := context.Background()
		return f.Do(func() error {
			if err := f.Cursor.Sync(ctx); err != nil {
				return err
			}
			return f.backend.tend(ctx, time.Now())
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Tracker.Notify(r.Trigger)
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, changes := heap(), 0
	f.loseNothing(func() {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		for start := time.Now(); time.Since(start) < *flood; time.Sleep(10 * time.Millisecond) {
			// A busy machine makes fewer changes; it does not catch up.
			for range min(int(time.Since(start).Seconds()*float64(*rate))-changes, *rate/4) {
				changes++
				i := 1000 + f.rng.IntN(services)
				switch f.rng.IntN(12) {
				case 0:
					setPods(f.Tracker, f.pods, 1+f.rng.IntN(len(f.pods)), f.rng)
				case 1:
					f.Tracker.DeleteService(svcName(i))
				case 2:
					f.Tracker.SetService(svc(i, nodePort(int32(30000+i)), externalIPs(fmt.Sprint("198.18.0.", f.rng.IntN(250)))))
				case 3:
					f.Tracker.SetService(svc(i, nodePort(int32(30000+i)), externalLocal, affinity(100)))
				case 4:
					f.Tracker.SetService(svc(i))
				default:
					f.Tracker.SetSlice(slice(i, v1.ProtocolTCP, f.rng.Perm(200)[:f.rng.IntN(6)]...))
				}
			}
		}
		stop()
		<-done
		f.Sync()

		// In a rolling restart, each step adds one pod and removes one.
		for n := range f.pods {
			three := append(f.pods[n:len(f.pods):len(f.pods)], f.pods[:n]...)[:3]
			f.Tracker.SetSlice(podSlice(50, v1.ProtocolTCP, three, len(three), f.rng))
			f.Sync()
			if err := f.backend.tend(t.Context(), time.Now()); err != nil {
				t.Error(err)
			}
		}
	})
	after := heap()
	t.Logf("%d changes in %v and %d syncs, the longest wait was %v; heap %d kB before, %d after", changes, *flood, syncs, slowest.Round(time.Millisecond), before>>10, after>>10)
	if after > before+before/4+4<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}

	// A relist must make no requests.
	for _, s := range f.Engine.Snapshot().Ports {
		if s.Key.Name == svcName(50).Name || s.Key.Name == svcName(51).Name {
			continue
		}
		f.Tracker.DeleteService(s.Key.NamespacedName)
	}
	list := func() {
		for i := range services {
			s := svc(1000+i, nodePort(int32(30000+i)), externalLocal)
			s.ResourceVersion = fmt.Sprint(time.Now())
			f.Tracker.SetService(s)
			f.Tracker.SetSlice(slice(1000+i, v1.ProtocolTCP, 1, -1-i, -200, -300))
		}
	}
	list()
	f.Sync()
	must.Do(t, f.backend.tend(t.Context(), time.Now().Add(time.Hour)))
	made := count(f.backend)
	list()
	f.Sync()
	if n := made.total(); n != 0 {
		t.Errorf("a relist made %d requests, want 0", n)
	}
	f.restartWritesNothing()
}

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
		must.Do(t, f.backend.tend(ctx, time.Now().Add(time.Hour)))
	}
	// By default, addresses that no Service owns drain for 15 minutes.
	const limit = 24 * time.Hour
	f.backend.config.DrainLimit = limit
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
			must.Do(t, f.backend.kernel.reals(k, func(r real) { marked += r.active }))
		}
	}
	if marked == 0 {
		t.Error("no connection has a virtual server for internal traffic")
	}

	restart := func() {
		f.Cursor.Detach()
		f.backend.Close()
		b := must.Get(New(ctx, Config{NetNS: f.Env.NetNS, Families: f.Env.Families, DrainLimit: limit}))(t)
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
