//go:build linux

package nftables

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// FuzzNames programs a Service with arbitrary names. Except for comments, nft's listing must be
// the same as for plain names.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"svc", `a" : drop; }`, "a\n}\ntable ip evil {", `\"`, "$x", "'`$(reboot)`", "", strings.Repeat("x", 300), "\x00", "ü", "# c", "*/", "@endpoints", "a, 10.0.0.1 . tcp . 22"} {
		f.Add(s, "ns", "p", int64(10))
		f.Add("svc", s, s, int64(0))
	}
	var host *netlab.Host
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, name, namespace, port string, seconds int64) {
		netlab.Require(t)
		if host == nil { // one host in each process of the fuzzer
			lab := netlab.New()
			if host = lab.Host("node"); lab.Err != nil {
				t.Fatal(lab.Err)
			}
		}
		netlab.NeedPrograms(t, "nft")
		b := must.Get(New(t.Context(), Config{NetNS: host.File(), Families: []tracker.Family{tracker.IPv4}}))(t)
		defer b.Close()
		program := func(name, namespace, port string) string {
			p := tracker.PortState{Port: &tracker.ServicePort{ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80}}
			p.Port.Key.Namespace, p.Port.Key.Name, p.Port.Key.Port = namespace, name, port
			p.Port.Key.Protocol, p.Port.Key.Family = v1.ProtocolTCP, tracker.IPv4
			if seconds > 0 && seconds < 86400 {
				p.Port.Affinity = time.Duration(seconds) * time.Second
			}
			p.Endpoints = []*tracker.Endpoint{{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Node: "m", Ready: true, Serving: true, Weight: 1}}
			node := &ruleset.Node{Info: tracker.NodeInfo{Name: "n"}}
			s := ruleset.Compile(p, node)
			s.ID = 1
			c := ruleset.Change{Key: p.Port.Key, New: s, Fields: ruleset.FieldAll}
			// Begin without a table, so that the listing depends on the Service alone.
			must.Do(t, Cleanup(t.Context(), Config{NetNS: host.File(), Families: []tracker.Family{tracker.IPv4}}))
			must.Do(t, b.Apply(t.Context(), &ruleset.Delta{Full: true, Node: node, Changes: []ruleset.Change{c}}))
			listing := must.Get(host.Run(t, "nft", "list", "ruleset"))(t)
			found, err := lookUp(t.Context(), Config{NetNS: host.File(), Families: []tracker.Family{tracker.IPv4}}, netip.MustParseAddrPort("10.96.0.1:80"), v1.ProtocolTCP)
			if err != nil || len(found.Endpoints) != 1 || found.Service != nft.Printable(found.Service) {
				t.Fatalf("%+v, %v", found, err)
			}
			// Some numbers are random.
			return drawnNumbers.ReplaceAllString(comments.ReplaceAllString(listing, "comment"), "number")
		}
		if got, want := program(name, namespace, port), program("svc", "ns", "p"); got != want {
			t.Errorf("%s", backendtest.FirstDifference(got, want))
		}
	})
}

var (
	// comments matches comments.
	comments = regexp.MustCompile(`comment "[^"]*"`)
	// drawnNumbers matches dispatch keys and the numbers of endpoints with affinity.
	drawnNumbers = regexp.MustCompile(`[0-9a-f]+:[0-9a-f]+`)
)

// TestOversizedServiceIsServed has Services that are larger than in any real cluster. A Service
// within the limits works. A Service beyond them has as many endpoints as the limits allow.
func TestOversizedServiceIsServed(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.Need(t, r.backend.conn.Limit() >= 8<<20-1<<10, "a socket buffer of 8 MiB (net.core.wmem_max)")
	many := func(i, endpoints int) {
		for n := range (endpoints + 999) / 1000 {
			es := epSlice(i, tracker.IPv4)
			es.Name = fmt.Sprintf("%s-%d", es.Name, n)
			for e := range min(1000, endpoints-1000*n) {
				a := netip.AddrFrom4([4]byte{10, 128 + byte(n>>6), byte(n<<2) + byte(e>>8), byte(e)})
				es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
			}
			r.tracker.SetSlice(es)
		}
	}
	r.tracker.SetService(svc(0))
	many(0, 3)
	// 2,000 ports, more than fit into etcd.
	r.tracker.SetService(svc(1, func(s *v1.Service) {
		s.Spec.Ports = nil
		for p := range int32(2000) {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", p), Port: 1 + p, Protocol: v1.ProtocolTCP})
		}
	}))
	es := epSlice(1, tracker.IPv4, 1, 2, 3)
	es.Ports = nil
	for p := range int32(2000) {
		name, number, proto := fmt.Sprint("p", p), 8000+p, v1.ProtocolTCP
		es.Ports = append(es.Ports, discovery.EndpointPort{Name: &name, Port: &number, Protocol: &proto})
	}
	r.tracker.SetSlice(es)
	// More endpoints than a Budget lets a Service have.
	r.tracker.SetService(svc(2))
	many(2, 21000)
	r.sync()
	r.verify()

	r.tracker.SetService(svc(3, sticky(100)))
	many(3, 70000)
	r.tracker.SetService(svc(4))
	many(4, 5)
	r.sync()
	for i, want := range map[int]int{3: layout.MaxStickyEndpoints, 4: 5} {
		if f, err := lookUp(t.Context(), Config{NetNS: r.host.File()}, netip.MustParseAddrPort(fmt.Sprintf("10.96.0.%d:80", i+1)), v1.ProtocolTCP); err != nil || len(f.Endpoints) != want {
			t.Errorf("Service %d: %d endpoints, want %d, %v", i, len(f.Endpoints), want, err)
		}
	}
	// With fewer it has all.
	for n := range 40 {
		es := epSlice(3, tracker.IPv4)
		es.Name = fmt.Sprintf("%s-%d", es.Name, n)
		r.tracker.SetSlice(es)
	}
	r.sync()
	if f, err := lookUp(t.Context(), Config{NetNS: r.host.File()}, netip.MustParseAddrPort("10.96.0.4:80"), v1.ProtocolTCP); err != nil || len(f.Endpoints) != 30000 {
		t.Errorf("%d endpoints, %v", len(f.Endpoints), err)
	}
}
