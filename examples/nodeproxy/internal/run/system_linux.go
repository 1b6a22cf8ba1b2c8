package run

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// setOOMScore sets this process's oom_score_adj (proc_pid_oom_score_adj(5)).
func setOOMScore(adj int32) error {
	const path = "/proc/self/oom_score_adj"
	value := strconv.Itoa(int(adj))
	if was, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(was)) == value {
		return nil // after dropPrivileges it could not be written again
	}
	return os.WriteFile(path, []byte(value), 0)
}

// Needed returns the capabilities that the agent keeps if it has them. CAP_NET_ADMIN is for
// rules, connection tracking and network parameters, CAP_NET_RAW for iptables-legacy,
// CAP_NET_BIND_SERVICE for servers at privileged ports, and CAP_DAC_READ_SEARCH for
// configuration, manifests and credentials of another user. --socket-lb also needs CAP_BPF
// and CAP_PERFMON. To end connected UDP sockets of pods it would also need CAP_SYS_ADMIN and
// CAP_SYS_PTRACE, which have too much power to be kept by default.
func Needed(socketLB bool) []int {
	keep := []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_NET_BIND_SERVICE, unix.CAP_DAC_READ_SEARCH}
	if socketLB {
		keep = append(keep, unix.CAP_BPF, unix.CAP_PERFMON)
	}
	return keep
}

// superfluous returns the capabilities in the bounding set of the process, except keep.
func superfluous(keep []int) []int {
	var out []int
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		// The kernel returns an error for a capability that it does not have.
		if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil && has == 1 && !slices.Contains(keep, c) {
			out = append(out, c)
		}
	}
	return out
}

// DropPrivileges drops all capabilities except those in keep. It reduces the bounding set and
// executes the same program again, which is the only way to do so for all threads of the
// process. It returns if there is nothing to give up, or if that fails: a process that may
// not reduce its bounding set is restricted already. Before it drops capabilities, it
// calls prepare and tells it whether CAP_SYS_MODULE is among them.
//
// It calls ready immediately before the execution, and returns if ready reports false. ready
// gives signals back to the kernel: the program that is executed does not see those that this
// one has received.
func DropPrivileges(log *slog.Logger, keep []int, prepare func(modules bool), ready func() bool) {
	drop := superfluous(keep)
	if len(drop) == 0 {
		return
	}
	prepare(slices.Contains(drop, unix.CAP_SYS_MODULE))
	// The bounding set belongs to a thread, and this thread must execute the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, c := range drop {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			log.Debug("capabilities stay as they are", "error", err)
			return
		}
	}
	if !ready() {
		return
	}
	if err := syscall.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil {
		log.Warn("cannot give up privileges", "error", fmt.Errorf("exec: %w", err))
	}
}
