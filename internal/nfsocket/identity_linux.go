package nfsocket

import (
	"os"

	"golang.org/x/sys/unix"
)

// Identity is what no two open files have in common: it tells a socket from another
// file with the same descriptor.
type Identity struct{ dev, ino uint64 }

// Identify returns the identity of an open file.
func Identify(fd int) (Identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Identity{}, os.NewSyscallError("fstat", err)
	}
	return Identity{uint64(st.Dev), st.Ino}, nil
}
