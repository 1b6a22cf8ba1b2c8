package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
)

// onlineFile lists the online CPUs (Documentation/admin-guide/cputopology.rst).
const onlineFile = "/sys/devices/system/cpu/online"

// cpus returns the number of CPUs by which connection tracking is sized: the online CPUs of
// the machine, even if the process may not run on all of them. Without a readable sysfs it
// returns [runtime.NumCPU].
func cpus() int {
	text, err := os.ReadFile(onlineFile)
	if err == nil {
		if n, err := countCPUs(strings.TrimSpace(string(text))); err == nil {
			return n
		}
	}
	return runtime.NumCPU()
}

// countCPUs returns the number of CPUs in a list such as "0-3,8".
func countCPUs(list string) (n int, err error) {
	for part := range strings.SplitSeq(list, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		first, err := strconv.Atoi(low)
		if err != nil {
			return 0, fmt.Errorf("CPU list %q: %w", list, err)
		}
		last, err := strconv.Atoi(high)
		if err != nil {
			return 0, fmt.Errorf("CPU list %q: %w", list, err)
		}
		if first < 0 || last < first {
			return 0, fmt.Errorf("CPU list %q: bad range %q", list, part)
		}
		n += last - first + 1
	}
	return n, nil
}
