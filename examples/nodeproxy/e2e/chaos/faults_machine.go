//go:build linux

package main

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// inMachine reports whether this process runs in a virtual machine of package internal/vm.
func inMachine() bool { return os.Getenv("PROXIER_VM_INSIDE") != "" }

// machineFaults affect the whole machine, so that only virtual machines get them.
var machineFaults = []fault{
	{"clock", func(w *world) (string, error) {
		by := time.Duration(w.rng.IntN(96)-48) * time.Hour
		ts, err := unix.TimeToTimespec(time.Now().Add(by))
		if err != nil {
			return "", err
		}
		return by.String(), unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
	}},
	{"full connection tracking", func(w *world) (string, error) {
		// The agent's connections to the API server are tracked, too.
		before, err := os.ReadFile(trackedMax)
		if err != nil {
			return "", err
		}
		d := time.Duration(w.rng.IntN(3000)) * time.Millisecond
		time.AfterFunc(d, func() { os.WriteFile(trackedMax, before, 0) })
		w.server.endWatches(w.rng.IntN(2) == 0)
		return fmt.Sprint(d), os.WriteFile(trackedMax, []byte("1"), 0)
	}},
}

// trackedMax is the greatest number of tracked connections.
const trackedMax = "/proc/sys/net/netfilter/nf_conntrack_max"
