//go:build linux

package nftables

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// longNamed returns Service number i and a slice of it. Their names have the greatest length
// that Kubernetes allows and differ only at the end.
func longNamed(i int) (*v1.Service, *discovery.EndpointSlice) {
	port := strings.Repeat("p", 15)
	s := svc(i, sticky(1000), func(s *v1.Service) {
		s.Namespace, s.Name = strings.Repeat("n", 63), strings.Repeat("s", 62)+string(rune('a'+i))
		s.Spec.Ports[0].Name = port
	})
	slice := epSlice(i, tracker.IPv4, 1, 2, 3)
	slice.Namespace, slice.Labels[discovery.LabelServiceName], slice.Ports[0].Name = s.Namespace, s.Name, &port
	return s, slice
}

// TestRestartKeepsLongNames restarts with Services whose names do not fit into a comment.
func TestRestartKeepsLongNames(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	for i := range 3 {
		s, slice := longNamed(i)
		r.tracker.SetService(s)
		r.tracker.SetSlice(slice)
	}
	r.sync()
	before := stickyEndpoints(r)
	if n := strings.Count(before, "10.244.0.1 "); n != 3 {
		t.Fatalf("%d pools: %s", n, before)
	}
	for range 2 {
		r.start()
		r.sync()
		r.verify()
		if after := stickyEndpoints(r); after != before {
			t.Errorf("endpoints are %s, were %s", after, before)
		}
	}
}

// TestReplacedTableRespectsClientLimit has a new process with a smaller limit of clients than the
// last one.
func TestReplacedTableRespectsClientLimit(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]int{"in place": 0, "by a staging table": smallLimit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, netlab.NewHost(t))
			netlab.NeedPrograms(t, "nft")
			r.limit = limit
			r.start()
			for i := range 60 {
				r.tracker.SetService(svc(i, sticky(1000)))
				r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(20)...))
			}
			r.sync()
			pool, _, _ := strings.Cut(stickyEndpoints(r)[strings.Index(stickyEndpoints(r), "800"):], ":")
			r.nft("add element ip " + r.backend.name + " sticky-clients { \"" + pool + ":0\" . 172.16.0.1 timeout 1000s : \"" + pool + ":1\"," +
				" \"" + pool + ":0\" . 172.16.0.2 timeout 1000s : \"" + pool + ":1\", \"" + pool + ":0\" . 172.16.0.3 timeout 1000s : \"" + pool + ":1\" }")
			for range 2 {
				r.cursor.Detach()
				r.backend.Close()
				two := withoutGrace
				two.Clients = 2
				b := must.Get(open(t.Context(), Config{NetNS: r.host.File()}, two))(t)
				if limit != 0 {
					limitTo(t, b, limit)
				}
				r.backend, r.cursor = b, r.engine.Attach("nftables", b)
				r.sync()
				r.verify()
				want := 3
				if limit != 0 {
					want = 2
				}
				if out := r.nft("list map ip " + r.backend.name + " sticky-clients"); strings.Count(out, "172.16.0.") != want {
					t.Errorf("%d clients should be remembered: %s", want, out)
				}
			}
		})
	}
}

// TestTablesWithFormerTypesAreReplaced starts on tables whose maps of buckets have the types of earlier
// versions, and beside a table that counts packets, which goes.
func TestTablesWithFormerTypesAreReplaced(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	for i := range 3 {
		r.tracker.SetService(svc(i, sticky(1000)))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(3)...))
	}
	r.tracker.SetService(svc(3))
	r.tracker.SetSlice(epSlice(3, tracker.IPv4, upTo(3)...))
	r.sync()
	before := stickyEndpoints(r)
	listing := r.nft("list ruleset")
	former := regexp.MustCompile(`typeof (.*) : ip6? daddr . [a-z]+ dport`).ReplaceAllStringFunc(listing, func(s string) string {
		if strings.Contains(s, "ip6") {
			return "type classid . mark : ipv6_addr . inet_service"
		}
		return "type classid . mark : ipv4_addr . inet_service"
	})
	former = regexp.MustCompile("typeof .* : meta priority").ReplaceAllString(former, "type classid . mark : classid")
	former = regexp.MustCompile(`(?m)^.*\bnumgen random .*\n`).ReplaceAllStringFunc(former, func(s string) string {
		if strings.Contains(s, "typeof") {
			return s
		}
		return "" // the tool does not load such rules
	})
	former += `table ip proxier-packets {
		set packets { type ipv4_addr . inet_proto . inet_service; size 1048576; flags dynamic
			elements = { 10.96.0.1 . tcp . 80 counter packets 7 bytes 700 } }
		chain count-input { type filter hook input priority filter; iifname != "lo" ct status dnat accept; }
		chain count-postrouting { type filter hook postrouting priority filter; ct status dnat accept; }
	}`
	if strings.Count(former, "classid . mark") != 8 {
		t.Fatalf("no former types in %s", former)
	}
	r.nft("flush ruleset; " + former)
	r.cursor.Detach()
	r.backend.Close()
	b := must.Get(open(t.Context(), Config{NetNS: r.host.File()}, withoutGrace))(t)
	t.Cleanup(func() { b.Close() })
	r.backend, r.cursor = b, r.engine.Attach("nftables", b)
	r.sync()
	if after := stickyEndpoints(r); after != before {
		t.Errorf("endpoints are %s, were %s", after, before)
	}
	r.tracker.SetSlice(epSlice(3, tracker.IPv4, upTo(4)...))
	r.sync()
	if err := b.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if now := r.nft("list table ip " + r.backend.name); strings.Contains(now, "classid . mark") || stable(now) == stable(listing) {
		t.Errorf("the table is %s", now)
	}
	if out := r.nft("list tables"); strings.Contains(out, "packets") {
		t.Errorf("tables: %s", out)
	}
}

// rangesOfRelease is what release 0.2.0 had for a range of ports with client affinity, beside the objects of
// every table.
const rangesOfRelease = `
table ip TABLE {
	map service-ranges {
		type ipv4_addr . inet_proto . inet_service : classid
		flags interval
		elements = { 10.96.0.9 . tcp . 80-90 comment "ns/svc-8:p" : 8000:1 }
	}
	map range-keys {
		type classid : classid
		size 4096
		elements = { 8000:1 : 87f0:8001 }
	}
	map range-sticky-handlers {
		type classid : verdict
		size 4096
	}
	set range-allowed-sources {
		type ipv4_addr . ipv4_addr . inet_proto . inet_service
		flags interval
	}
	map shift-from {
		type classid : inet_service
		size 4096
		elements = { 8001:0 : 8078 }
	}
	chain range-sticky-send {
		meta l4proto { tcp, udp, sctp } dnat ip to meta priority map @sticky-endpoints
	}
	chain range-sticky-2-1000s {
		jump sticky-recall
		goto range-sticky-send
	}
	chain range-sticky {
		meta priority set meta priority & f:ffff map @sticky-pools meta priority & 0:ffff vmap @range-sticky-handlers
	}
	chain ranges {
		meta priority set ip daddr . meta l4proto . th dport map @service-ranges meta priority set meta priority map @range-keys meta priority & fff0:0 vmap @handlers
	}
}
add rule ip TABLE services goto ranges
add rule ip TABLE nodeports goto ranges
add element ip TABLE handlers { 87f0:0 : goto range-sticky }
add element ip TABLE range-sticky-handlers { 0:1 : goto range-sticky-2-1000s }
`

// TestRangesOfReleaseAreReplaced starts on tables of release 0.2.0 with a range of ports. Clients keep their endpoints,
// and nothing of the range is left.
func TestRangesOfReleaseAreReplaced(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	r.tracker.SetService(svc(0, sticky(1000)))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(3)...))
	r.sync()
	before := stickyEndpoints(r)
	r.nft(strings.ReplaceAll(rangesOfRelease, "TABLE", r.backend.name))
	if old := r.nft("list table ip " + r.backend.name); !strings.Contains(old, "80-90") {
		t.Fatalf("no range in %s", old)
	}
	r.cursor.Detach()
	r.backend.Close()
	r.start()
	t.Cleanup(func() { r.backend.Close() })
	r.sync()
	r.verify()
	if err := r.backend.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if after := stickyEndpoints(r); after != before {
		t.Errorf("endpoints are %s, were %s", after, before)
	}
	if now := r.nft("list table ip " + r.backend.name); strings.Contains(now, "range") || strings.Contains(now, "shift") {
		t.Errorf("the table is %s", now)
	}
}

// makeOlder gives the tables the version of layout 1, and a chain and a map with their names in
// layout 1. do runs a function in the network namespace.
func makeOlder(t *testing.T, do func(func() error) error, table string) {
	t.Helper()
	script := ""
	for _, family := range []string{"ip", "ip6"} {
		at := family + " " + table
		script += fmt.Sprintf("delete element %s layout { %#x }; add element %s layout { 1 };", at, layout.Version, at)
		script += fmt.Sprintf("add chain %s near; add map %s classes { type classid : verdict; };", at, at)
	}
	nft := netlab.Command(t, "nft", script)
	err := do(func() error {
		if out, err := nft.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
