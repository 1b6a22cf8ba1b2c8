// Package runner calls a function that synchronizes something: soon after a
// trigger, not too often, again after a failure, and periodically.
//
//	r, err := runner.New(runner.Config{
//		Min: time.Second, Retry: 10 * time.Second, Max: time.Hour,
//		Resync: cur.Resync,
//	}, cur.Sync)
//	...
//	tr.Notify(r.Trigger)
//	return r.Run(ctx)
//
// [Runner] replaces kube-proxy's BoundedFrequencyRunner. It is not specific to Services.
//
// # When a run starts
//
// A run starts at the earliest of these times:
//
//   - the call of [Runner.Trigger], if it came after the start of the last run;
//   - [Config].Retry after the end of a failed run;
//   - [Config].Max after the end of the last successful periodic run or, before the
//     first one, after the start of Run.
//
// A run does not start before a pause has passed since the end of the last run. The
// pause is [Config].Min or, with a [Pace], depends on that run's duration and triggers. The
// first trigger after a quiet period therefore starts a run immediately. Any number of
// triggers during a run and the pause after it lead to one more run.
//
// A constant Min must suit the most expensive run and delays every change by
// that much. With a Pace, cheap runs follow each other closely:
//
//	Min: time.Millisecond, Pace: runner.Pace{Factor: 1, Most: time.Second, Burst: 10 * time.Millisecond}
//
// # Differences from kube-proxy's runner
//
//   - A trigger before Run is kept. One after Run has returned is kept for the next
//     Run.
//   - Other runs do not postpone periodic runs: a node that is always busy still gets
//     its full resync every Max.
//   - A panic in the function counts as an error: it is reported as a [PanicError],
//     and the function runs again after Retry.
//   - A second Run respects the pause and the Retry of the first.
//
// # Observability
//
// [Hooks] has hooks for latencies, counts and health checks. [Config].Log receives
// one line for each failure. A Runner works with package [testing/synctest].
package runner
