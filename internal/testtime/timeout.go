// Package testtime determines how long tests take and wait.
package testtime

import "time"

// Timeout is how long a test waits for an event before it fails. It is long enough for an
// emulated machine on busy processors. No test passes because of it: tests do not assert
// by time that something happens at once.
const Timeout = time.Minute
