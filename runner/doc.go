// Package runner decides when a function that brings something into agreement
// is run: soon after it was asked for, not too often, again after it failed, and
// once in a while in any case.
//
// A [Runner] is the part that kube-proxy calls BoundedFrequencyRunner. It knows
// nothing of Services: [ruleset.Cursor.Sync] is the function it was made for,
// and [tracker.Tracker.Notify] takes its Trigger.
//
//	r, err := runner.New(runner.Config{
//		Min: time.Second, Retry: 10 * time.Second, Max: time.Hour,
//		Resync: cur.Resync,
//	}, cur.Sync)
//	...
//	tr.Notify(r.Trigger)
//	return r.Run(ctx)
//
// # When it runs
//
// A run starts at the earliest of
//
//   - when [Runner.Trigger] was called, if that was since the last run started;
//   - [Config.Retry] after the end of a run that failed;
//   - [Config.Max] after the end of the last periodic run that did not fail,
//     counted from the start of Run at first,
//
// but not before a pause has passed since the end of the last run: [Config.Min] or,
// with a [Pace], a multiple of what that run took. So the first trigger of a quiet time
// is served at once, and any number of triggers during a run, or in the pause after
// it, lead to one more run.
//
// A constant Min has to suit the most expensive run there may be, and delays every
// change by as much. With a Pace, cheap runs follow each other closely:
//
//	Min: time.Millisecond, Pace: runner.Pace{Factor: 1, Most: time.Second}
//
// This differs from kube-proxy's runner, which has the same three intervals, in
// that
//
//   - a trigger before Run is kept, and one after Run has returned is harmless
//     and kept for the next Run;
//   - Max is not put off by other runs: a node that is busy all day has its full
//     resync every Max too;
//   - a panic in the function is an error like any other: it is reported as a
//     [PanicError], and the function is run again after Retry;
//   - intervals survive Run: a second Run respects the pause and Retry of the
//     first;
//   - the pause can follow the cost of a run.
//
// # Watching it
//
// [Trace] has hooks for latency, counts and health checks, and [Config.Log] gets
// a line for each failure. Time comes from [Config.Clock], so that a test, or a
// simulation, may bring its own.
//
// [ruleset.Cursor.Sync]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Cursor.Sync
// [tracker.Tracker.Notify]: https://pkg.go.dev/github.com/go-proxier/proxier/tracker#Tracker.Notify
package runner
