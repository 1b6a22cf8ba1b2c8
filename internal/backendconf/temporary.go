package backendconf

import (
	"errors"
	"slices"
	"syscall"
)

// Temporary reports whether an error is the kernel's that what it needs is short or in use at the
// moment, so that it says nothing about the features of the system.
func Temporary(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && slices.Contains([]syscall.Errno{
		syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EINTR, syscall.EBUSY, syscall.EEXIST, syscall.EMFILE, syscall.ENFILE,
	}, errno)
}
