// Package runner calls a function that synchronizes something: soon after a trigger, not too often, again after a failure,
// and periodically. [Runner] replaces kube-proxy's BoundedFrequencyRunner. It is not specific to Services.
//
//	r, err := runner.New(runner.Config{
//		Min: time.Second, Retry: 10 * time.Second, Max: time.Hour,
//		Resync: cur.Resync,
//	}, cur.Sync)
//	...
//	tr.Notify(r.Trigger)
//	return r.Run(ctx)
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
// A run does not start before a pause has passed since the end of the last run. The pause is [Config].Min or, with a
// [Pace], depends on that run's duration and triggers, so that cheap runs follow each other closely. Any number of
// triggers during a run and the pause after it lead to one more run.
//
// # Differences from kube-proxy's runner
//
//   - A trigger before Run is kept. One after Run has returned is kept for the next Run.
//   - Other runs do not postpone periodic runs: a busy node still gets its full resync every Max.
//   - A panic in the function counts as an error, a [PanicError].
//   - A second Run respects the pause and the Retry of the first.
//
// A Runner works with package [testing/synctest].
package runner
