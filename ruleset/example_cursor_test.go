package ruleset_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// newEngine returns an engine for node-a that has the Service web.
func newEngine() (*ruleset.Engine, error) {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		return nil, err
	}
	t.SetService(web)
	t.SetSlice(webSlice())
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return ruleset.NewEngine(ruleset.Config{Source: t})
}

// A backend reports that one Service failed. The next Sync offers this Service again.
func ExampleCursor_Sync() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	tries := 0
	cursor := engine.Attach("plane", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		if tries++; tries == 1 {
			return &ruleset.PartialError{Failed: map[tracker.Key]error{webKey: errors.New("table full")}}
		}
		return nil
	}))
	ctx := context.Background()
	fmt.Println(cursor.Sync(ctx))
	fmt.Println("acknowledged:", cursor.Port(webKey) != nil)
	fmt.Println(cursor.Sync(ctx))
	fmt.Println("acknowledged:", cursor.Port(webKey) != nil)
	// Output:
	// ruleset: sync plane: 1 services failed; shop/web/TCP/IPv4: table full
	// acknowledged: false
	// <nil>
	// acknowledged: true
}

// Find the Service at an address, as the backend has acknowledged it.
func ExampleCursor_Lookup() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	cursor := engine.Attach("plane", ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
	if err := cursor.Sync(context.Background()); err != nil {
		fmt.Println(err)
	}
	s, f := cursor.Lookup(netip.MustParseAddrPort("172.30.0.1:80"), v1.ProtocolTCP)
	fmt.Println(s.Key, f.Kind, s.Pool(f.Target))
	// Output: shop/web/TCP/IPv4 cluster IP [10.1.0.1:8080 10.2.0.1:8080]
}

// Print the state of a Service whose change failed, for example for a database of
// states. A follower of the cursor (Follow) learns which Services changed.
func ExampleCursor_Status() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	full := true
	cursor := engine.Attach("plane", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		if full {
			return &ruleset.PartialError{Failed: map[tracker.Key]error{webKey: errors.New("table full")}}
		}
		return nil
	}))
	for range 2 {
		if err := cursor.Sync(context.Background()); !ruleset.InEffect(err) {
			fmt.Println(err)
		}
		s := cursor.Status(webKey)
		fmt.Println("in effect:", s.Port != nil)
		if s.Port != nil {
			fmt.Println("  for", time.Since(s.Since).Round(time.Minute))
		}
		if !s.WaitingSince.IsZero() {
			fmt.Println("waits for", time.Since(s.WaitingSince).Round(time.Minute), "because of:", s.Err)
		}
		full = false
	}
	// Output:
	// in effect: false
	// waits for 0s because of: table full
	// in effect: true
	//   for 0s
}
