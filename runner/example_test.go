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
		Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) {
			fmt.Printf("triggers %d, error %v\n", i.Triggers, i.Err)
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
	// triggers 2, error the kernel is busy
	// triggers 0, error <nil>
	// context canceled
}

// Trigger continuously. The pause after each run is as long as the run, but at least a
// millisecond and at most a second.
func ExamplePace() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	runs := 0
	r, err := runner.New(runner.Config{
		Min:  time.Millisecond,
		Pace: runner.Pace{Factor: 1, Most: time.Second},
	}, func(context.Context) error {
		if runs++; runs == 3 {
			cancel()
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	go func() {
		for ctx.Err() == nil {
			r.Trigger()
			time.Sleep(100 * time.Microsecond)
		}
	}()
	fmt.Println(r.Run(ctx), "after", runs, "runs")
	// Output: context canceled after 3 runs
}

// A panic in the function counts as a failure of the run.
func ExamplePanicError() {
	ctx, cancel := context.WithCancel(context.Background())
	r, err := runner.New(runner.Config{Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) {
		var p *runner.PanicError
		fmt.Println(errors.As(i.Err, &p), i.Err)
		cancel()
	}}}, func(context.Context) error { panic("no rules") })
	if err != nil {
		fmt.Println(err)
		return
	}
	r.Trigger()
	_ = r.Run(ctx)
	// Output: true runner: panic: no rules
}
