package runner_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-proxier/proxier/runner"
)

// Run a function that fails once. Two triggers before Run lead to one run.
func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	attempts := 0
	sync := func(context.Context) error {
		if attempts++; attempts == 1 {
			return errors.New("the kernel is busy")
		}
		return nil
	}
	r, err := runner.New(runner.Config{
		Min:   time.Millisecond,
		Retry: 5 * time.Millisecond,
		Max:   time.Hour,
		Trace: &runner.Trace{SyncDone: func(i runner.Info) {
			fmt.Printf("%v, triggers %d, error %v\n", i.Reason, i.Triggers, i.Err)
			if i.Err == nil {
				cancel()
			}
		}},
	}, sync)
	if err != nil {
		fmt.Println(err)
		return
	}
	r.Trigger() // tracker.Tracker.Notify would call it
	r.Trigger()
	fmt.Println(r.Run(ctx))
	// Output:
	// triggered, triggers 2, error the kernel is busy
	// retry, triggers 0, error <nil>
	// context canceled
}
