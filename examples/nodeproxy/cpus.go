package main

import (
	"os"
	"runtime"
	"strings"

	"k8s.io/utils/cpuset"
)

// onlineFile lists the online CPUs (Documentation/admin-guide/cputopology.rst).
const onlineFile = "/sys/devices/system/cpu/online"

// cpus returns the number of CPUs by which connection tracking is sized: the online CPUs of
// the machine, even if the process may not run on all of them. Without a readable sysfs it
// returns [runtime.NumCPU].
func cpus() int {
	text, err := os.ReadFile(onlineFile)
	if err == nil {
		if set, err := cpuset.Parse(strings.TrimSpace(string(text))); err == nil && !set.IsEmpty() {
			return set.Size()
		}
	}
	return runtime.NumCPU()
}
