//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// ranged is the tracker's hook for Services with the annotation "range": the last port of a range and
// its first target port, which is 0 for a range that is not shifted.
func ranged(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	if text := s.Annotations["range"]; text != "" {
		if _, err := fmt.Sscan(text, &p.LastPort, &p.TargetPort); err != nil {
			return err
		}
	}
	return nil
}

func portRange(last int) func(*v1.Service) { return shiftedRange(last, 0) }

func shiftedRange(last, target int) func(*v1.Service) {
	return func(s *v1.Service) { s.Annotations = map[string]string{"range": fmt.Sprint(last, target)} }
}

// newRangeRig returns a rig whose Services can have ranges of ports.
func newRangeRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{TB: t, host: netlab.NewHost(t)}
	needNFT(t, r.host)
	p := backendtest.NewNode(t, tracker.Config{OnService: ranged})
	r.tracker, r.engine = p.Tracker, p.Engine
	r.start()
	t.Cleanup(func() { r.backend.Close() })
	return r
}

// TestRangesComeAndGo adds, changes and removes ranges of ports. Without ranges, no rule leads to
// their chains, and a restart removes these. Changes of endpoints must not change the set of
// ranges.
func TestRangesComeAndGo(t *testing.T) {
	t.Parallel()
	r := newRangeRig(t)
	table := func() string { return r.nft("list table ip " + r.backend.name) }
	has := func(what, text string, want bool) {
		t.Helper()
		if out := table(); strings.Contains(out, text) != want {
			t.Errorf("%s: the table has %q: %t, want %t\n%s", what, text, !want, want, out)
		}
	}
	set := func(i int, eps []int, edits ...func(*v1.Service)) {
		r.tracker.SetService(svc(i, edits...))
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			r.tracker.SetSlice(epSlice(i, f, eps...))
		}
	}
	check := func() {
		t.Helper()
		r.sync()
		r.verify()
	}
	external := backendtest.ExternalIPs("198.51.100.1", "2001:db8:3::1")
	set(0, upTo(2))
	check()
	has("without ranges", "range", false)

	set(1, upTo(3), external, nodePort(30001), portRange(9000), sticky(600))
	check()
	before := r.nft("list map ip " + r.backend.name + " service-ranges")
	has("a range", "10.96.0.1 . tcp . 80-9000 comment \"default/svc-1:http\"", strings.Contains(before, "default/svc-1:http"))
	has("a range", "goto ranges", true)
	has("a range", "chain range-sticky-3-600s", true)
	set(1, upTo(5), external, nodePort(30001), portRange(9000), sticky(600))
	check()
	if after := r.nft("list map ip " + r.backend.name + " service-ranges"); after != before {
		t.Errorf("new endpoints changed the set of ranges from %s to %s", before, after)
	}
	if out := r.nft("list set ip " + r.backend.name + " connections"); strings.Contains(out, "9000") {
		t.Errorf("ports of a range are counted: %s", out)
	}

	// Lookup and Ready find ranges.
	to := netip.AddrPortFrom(svcAddr(t, r, 1), 81)
	found, err := Lookup(t.Context(), Config{NetNS: r.host.File()}, dataplane.Query{Packet: ruleset.Packet{To: to, Protocol: v1.ProtocolTCP}})
	if err != nil || len(found.Endpoints) != 5 || found.Endpoints[0].Port() != 81 || !strings.HasSuffix(found.Where, "sticky, chain range-sticky-5-600s") {
		t.Errorf("Lookup of %v found %+v, %v", to, found, err)
	}
	if found, err := Lookup(t.Context(), Config{NetNS: r.host.File()}, dataplane.Query{Packet: ruleset.Packet{To: netip.AddrPortFrom(to.Addr(), 9001), Protocol: v1.ProtocolTCP}}); err != nil || found.Entry {
		t.Errorf("Lookup behind the range found %+v, %v", found, err)
	}
	ready, err := Ready(t.Context(), Config{NetNS: r.host.File()})
	if n := len(ready); err != nil || n != 4 {
		t.Errorf("Ready returned %v, %v", ready, err)
	}

	// A restart rewrites the table around the set of ranges.
	handle := func() string {
		out, err := r.host.Run(t, "nft", "-a", "list map ip "+r.backend.name+" service-ranges")
		if err != nil || !strings.Contains(out, "# handle ") {
			t.Fatalf("%v: %s", err, out)
		}
		return out
	}
	was := handle()
	for range 2 {
		r.start()
		check()
		if is := handle(); is != was {
			t.Errorf("a restart changed the set of ranges from %s to %s", was, is)
		}
	}
	has("after a restart", "goto ranges", true)
	// Without a process, one range changes its end, one comes, and one goes.
	r.backend.Close()
	for i, last := range []int{0, 8000, 70} {
		if i != 0 {
			set(i, upTo(5), external, portRange(max(last, 90)))
		}
	}
	r.start()
	check()
	has("after a change and a restart", ". 80-8000 ", true)
	has("after a change and a restart", "80-9000", false)
	set(1, upTo(5), external, nodePort(30001), portRange(9000), sticky(600))
	check()
	set(2, upTo(1), portRange(65535))
	set(1, upTo(5), external, portRange(100))
	check()
	has("other ranges", ". 80-100 ", true)
	has("other ranges", "80-9000", false)

	// The last range goes.
	set(1, upTo(5), external)
	set(2, nil)
	check()
	has("no ranges", "goto "+layout.ChainRanges, false)
	has("no ranges", "jump "+layout.ChainOwnRanges, false)
	set(2, upTo(1), portRange(81))
	check()
	has("a range again", "goto ranges", true)
	set(2, upTo(1))
	check()
	r.start()
	check()
	has("a restart without ranges", "range", false)
}

// TestShiftsComeAndGo shifts ranges of ports up and down, with and without client affinity. A
// shift that the kernel cannot compute fails alone.
func TestShiftsComeAndGo(t *testing.T) {
	t.Parallel()
	r := newRangeRig(t)
	set := func(i int, edits ...func(*v1.Service)) {
		t.Helper()
		r.tracker.SetService(svc(i, append(edits, backendtest.ExternalIPs("198.51.100.1", "2001:db8:3::1"))...))
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			r.tracker.SetSlice(epSlice(i, f, upTo(3)...))
		}
	}
	reaches := func(i int, port, want uint16) {
		t.Helper()
		to := netip.AddrPortFrom(svcAddr(t, r, i), port)
		found, err := Lookup(t.Context(), Config{NetNS: r.host.File()}, dataplane.Query{Packet: ruleset.Packet{To: to, Protocol: v1.ProtocolTCP}})
		if err != nil || len(found.Endpoints) != 3 || found.Endpoints[0].Port() != want {
			t.Errorf("Lookup of %v found %+v, %v, want port %d", to, found, err, want)
		}
	}
	shifts := func(want int) {
		t.Helper()
		r.sync()
		r.verify()
		for _, s := range []string{"shift-from", "shift-to"} {
			if out := r.nft("list map ip " + r.backend.name + " " + s); strings.Count(out, " : ") != want+1 {
				t.Errorf("want %d shifts in %s", want, out)
			}
		}
		if err := r.host.Do(func() error { return loads(t, false) }); err != nil {
			t.Error(err)
		}
	}
	set(1, shiftedRange(9000, 10080))
	set(2, shiftedRange(99, 20), sticky(600), nodePort(30002))
	shifts(2)
	reaches(1, 81, 10081)
	reaches(2, 99, 39)
	if out := r.nft("list chain ip " + r.backend.name + " range-pool-3"); strings.Count(out, "dnat ip to") != 6 { // two for each protocol
		t.Errorf("nft lists %s", out)
	}

	// One shift changes, one goes, and the affinity of one goes.
	set(1, shiftedRange(9000, 11080))
	shifts(2)
	reaches(1, 9000, 20000)
	set(2, shiftedRange(99, 20))
	shifts(2)
	reaches(2, 80, 20)
	set(1, portRange(9000))
	shifts(1)
	reaches(1, 9000, 9000)
	r.start()
	shifts(1)
	reaches(2, 99, 39)

	// A shift that is not possible does not stop others, and a possible one takes its place.
	set(3, shiftedRange(65535, 1))
	set(1, shiftedRange(100, 90))
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 2 {
		t.Fatalf("Sync returned %v", err)
	}
	for k, err := range partial.Failed {
		if k.Name != svc(3).Name || !errors.Is(err, model.ErrShift) {
			t.Errorf("%v failed: %v", k, err)
		}
	}
	reaches(1, 81, 91)
	set(3, shiftedRange(65535, 80))
	shifts(2)
	reaches(3, 65535, 65535)
	set(3, shiftedRange(100, 1))
	shifts(3)
	reaches(3, 81, 2)
}

// svcAddr returns the IPv4 cluster IP of Service number i.
func svcAddr(t *testing.T, r *rig, i int) netip.Addr {
	t.Helper()
	for _, s := range r.engine.Snapshot().Ports {
		if s.Key.Name == svc(i).Name && s.Key.Family == tracker.IPv4 {
			return s.Frontends[0].Addr
		}
	}
	t.Fatal("there is no such Service")
	return netip.Addr{}
}
