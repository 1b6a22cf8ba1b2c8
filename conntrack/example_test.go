package conntrack_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// flows is the table of a data plane in userspace. Without Config.Table the
// Cleaner works on the kernel's table.
type flows []conntrack.Flow

func (t flows) Dump(_ context.Context, f tracker.Family, see func(*conntrack.Flow)) error {
	for i := range t {
		if tracker.FamilyOf(t[i].Dst.Addr()) == f {
			see(&t[i])
		}
	}
	return nil
}

func (t flows) Delete(_ context.Context, doomed []conntrack.Flow) (int, error) {
	for _, f := range doomed {
		fmt.Println("delete", f.Src, "->", f.Dst, "that was sent to", f.ReplySrc)
	}
	return len(doomed), nil
}

func (t flows) LocalAddrs(context.Context, tracker.Family) ([]netip.Addr, error) { return nil, nil }

// Two clients of a DNS Service with two endpoints. One endpoint is removed.
func Example() {
	ap := netip.MustParseAddrPort
	table := flows{
		{Protocol: 17, Src: ap("10.9.0.1:4000"), Dst: ap("10.96.0.10:53"), ReplySrc: ap("10.0.0.1:53"), ReplyDst: ap("10.9.0.1:4000")},
		{Protocol: 17, Src: ap("10.9.0.2:4000"), Dst: ap("10.96.0.10:53"), ReplySrc: ap("10.0.0.2:53"), ReplyDst: ap("10.9.0.2:4000")},
	}
	cleaner, err := conntrack.New(context.Background(), conntrack.Config{Table: table})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cleaner.Close()
	backend := cleaner.Wrap(ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		fmt.Println("rules of", len(d.Changes), "service in effect")
		return nil
	}))

	// The deltas that a ruleset.Engine would pass to the backend.
	port := &tracker.ServicePort{
		Key: tracker.Key{
			ServicePortName: tracker.ServicePortName{
				NamespacedName: types.NamespacedName{Namespace: "kube-system", Name: "kube-dns"},
				Port:           "dns", Protocol: v1.ProtocolUDP,
			},
			Family: tracker.IPv4,
		},
		ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 53,
	}
	one := &tracker.Endpoint{Addr: ap("10.0.0.1:53"), Ready: true, Serving: true, Weight: 1}
	two := &tracker.Endpoint{Addr: ap("10.0.0.2:53"), Ready: true, Serving: true, Weight: 1}
	node := &ruleset.Node{}
	compile := func(e ...*tracker.Endpoint) *ruleset.Port {
		return ruleset.Compile(tracker.PortState{Port: port, Endpoints: e}, node)
	}
	both, left := compile(one, two), compile(two)
	for _, d := range []*ruleset.Delta{
		{Full: true, Node: node, Changes: []ruleset.Change{{Key: port.Key, New: both}}},
		{Node: node, OldNode: node, Changes: []ruleset.Change{{Key: port.Key, Old: both, New: left}}},
	} {
		if err := backend.Apply(context.Background(), d); err != nil {
			fmt.Println(err)
		}
		// An agent runs cleaner.Run in a goroutine of its own, which flushes after each Sync.
		if err := cleaner.Flush(context.Background()); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// rules of 1 service in effect
	// rules of 1 service in effect
	// delete 10.9.0.1:4000 -> 10.96.0.10:53 that was sent to 10.0.0.1:53
}

// options is an extension that a hook of the tracker attaches to a Service port.
type options struct{ keepFlows bool }

func (o options) Equal(other tracker.Extension) bool { return o == other }

// A data plane with its own conntrack zone for each family, a virtual NodePort address in each,
// and Services whose flows must not be deleted.
func ExampleConfig() {
	cleaner, err := conntrack.New(context.Background(), conntrack.Config{
		Zones: []uint16{65520, 65510},
		NodePortAddrs: []netip.Addr{
			netip.MustParseAddr("169.254.0.252"), netip.MustParseAddr("fc01::aabb:ccdd:eefe"),
		},
		Filter: func(s *ruleset.Port, _ conntrack.Flow) bool {
			o, _ := s.Spec.Ext.(options)
			return !o.keepFlows
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer cleaner.Close()
}

// A table that logs the flows that a Cleaner deletes from the kernel's table.
func ExampleOpenKernelTable() {
	table, err := conntrack.OpenKernelTable(conntrack.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer table.Close()
	cleaner, err := conntrack.New(context.Background(), conntrack.Config{Table: logging{table}})
	if err != nil {
		log.Fatal(err)
	}
	defer cleaner.Close()
}

type logging struct{ conntrack.FlowTable }

func (l logging) Delete(ctx context.Context, flows []conntrack.Flow) (int, error) {
	log.Printf("%d stale flows", len(flows))
	return l.FlowTable.Delete(ctx, flows)
}
