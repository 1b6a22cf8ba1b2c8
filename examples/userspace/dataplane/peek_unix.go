//go:build unix

package dataplane

import "golang.org/x/sys/unix"

// peek reports whether a datagram or an error can be read.
func peek(fd uintptr) (bool, error) {
	var one [1]byte
	for {
		_, _, err := unix.Recvfrom(int(fd), one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch err {
		case nil:
			return true, nil
		case unix.EINTR:
		case unix.EAGAIN:
			return false, nil
		default:
			return false, err
		}
	}
}
