package ruleset_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-proxier/proxier/ruleset"
)

// A plane may forward a Service only after its address was reserved. The reservation fails at first.
func ExampleGate() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	plane := ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		fmt.Println("the plane gets", len(d.Changes), "changes")
		return nil
	})
	pool := 0
	cursor := engine.Attach("plane", ruleset.Gate(plane, func(_ context.Context, c ruleset.Change) error {
		if c.New != nil && pool == 0 {
			return errors.New("no address is free")
		}
		return nil
	}))
	fmt.Println(cursor.Sync(context.Background()))
	pool = 1
	fmt.Println(cursor.Sync(context.Background()))
	// Output:
	// the plane gets 0 changes
	// ruleset: sync plane: 1 services failed; shop/web/TCP/IPv4: no address is free
	// the plane gets 1 changes
	// <nil>
}
