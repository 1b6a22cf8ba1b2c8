//go:build linux

package nftables

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
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
