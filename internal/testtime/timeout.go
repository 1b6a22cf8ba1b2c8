// Package testtime holds how long tests wait.
package testtime

import "time"

// Timeout is how long a test waits for something that must happen before it fails. It
// is long enough for an emulated machine on busy processors, and no test passes
// because of it: what must happen at once is asserted by other means than by time.
const Timeout = time.Minute
