package main

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
)

// needed returns the capabilities that the agent keeps if it has them:
// CAP_NET_ADMIN for rules, connection tracking and network parameters;
// CAP_NET_RAW for iptables-legacy; CAP_NET_BIND_SERVICE for the case that its
// servers are to listen at a privileged port; and CAP_DAC_READ_SEARCH because
// configuration, manifests and credentials may belong to another user. --socket-lb takes
// CAP_BPF and CAP_PERFMON.
func needed(c *config.Config) []int {
	if c.SocketLB.Enabled {
		return append(alwaysNeeded(), unix.CAP_BPF, unix.CAP_PERFMON)
	}
	return alwaysNeeded()
}

func alwaysNeeded() []int {
	return []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_NET_BIND_SERVICE, unix.CAP_DAC_READ_SEARCH}
}

// superfluous returns the capabilities that this process, or one that it starts,
// could have, but for those to keep.
func superfluous(keep []int) []int {
	var out []int
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		// An error is a capability that the kernel does not know.
		if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil && has == 1 && !slices.Contains(keep, c) {
			out = append(out, c)
		}
	}
	return out
}

// dropPrivileges gives up for good what the agent does not need, by becoming the
// same program once more with a smaller bounding set: there is no other way to do
// it for all threads of a process at once. Where that is not allowed somebody has
// already restricted the process, and it stays as it is. It returns only if there
// is nothing to give up, or it cannot be done. Before, it calls prepare with whether
// CAP_SYS_MODULE is among what is given up.
func dropPrivileges(log *slog.Logger, keep []int, prepare func(modules bool)) {
	drop := superfluous(keep)
	if len(drop) == 0 {
		return
	}
	prepare(slices.Contains(drop, unix.CAP_SYS_MODULE))
	// The thread must be the one that becomes the program. If that fails it is of no
	// more use to others than before.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, c := range drop {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			log.Debug("capabilities stay as they are", "error", err)
			return
		}
	}
	if err := syscall.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil {
		log.Warn("cannot give up privileges", "error", fmt.Errorf("exec: %w", err))
	}
}
