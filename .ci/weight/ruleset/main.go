// Command ruleset uses package ruleset of the library. It is built, not run.
package main

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func main() {
	t, err := tracker.New(tracker.Config{})
	if err != nil {
		panic(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		panic(err)
	}
	c := e.Attach("", ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
	fmt.Println(c.Sync(context.Background()), e.Snapshot().Trace(ruleset.Packet{}))
}
