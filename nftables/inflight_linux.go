package nftables

import (
	"time"

	"golang.org/x/sys/unix"
)

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// WaitForPackets implements [connection]. The kernel runs hooks inside an RCU read-side critical
// section, and membarrier(2) waits for such sections on all CPUs, about 20 ms. A virtual machine
// whose CPUs the host takes away holds packets in a hook for milliseconds.
func (*socket) WaitForPackets() {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		// The kernel was built without the call, or has CPUs without a timer tick (nohz_full).
		time.Sleep(20 * time.Millisecond)
	}
}
