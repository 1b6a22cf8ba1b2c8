package iptables

import (
	"errors"

	"github.com/go-proxier/proxier/internal/iptool"
)

// ErrLocked is wrapped by errors about the xtables lock, which another process held for
// longer than [Config.LockWait]. Nothing was changed.
var ErrLocked = iptool.ErrLocked

// ErrHash is wrapped by the error of a Service that is refused because its endpoints must
// follow from a hash (see [HashRefused]).
var ErrHash = errors.New("iptables: endpoints cannot be chosen by a hash")

// CommandError is the failure of a program. Unless a signal ended the program, nothing of
// its input is in effect. Its fields are:
//
//	Program string // the program's path
//	Status  int    // its exit status, -1 if a signal ended it
//	Message string // what it wrote to standard error, at most 4 KiB
//	Line    int    // the line of its input that Message names, counted from 1, or 0
//	Text    string // that line, or ""
//	Cause   error  // ErrLocked, the error of the context, or nil
//
// Its methods, of *CommandError, are:
//
//	Error() string  // returns all fields in one line
//	Unwrap() error  // returns Cause
//	Killed() bool   // reports whether a signal ended the program, which may have done its work
//	TooLarge() bool // reports whether the input was too large for one message to the kernel
type CommandError = iptool.Error

// killed reports whether a signal ended a program. The program may have done its work.
func killed(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.Killed()
}

// tooLarge reports whether the input was too large for one message to the kernel.
func tooLarge(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.TooLarge()
}

// refused reports whether a program or the kernel rejected the input itself.
func refused(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && !e.Killed() && e.Cause == nil && !e.TooLarge()
}
