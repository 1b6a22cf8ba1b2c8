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
// its input is in effect. Program is its path and Status its exit status, -1 if a signal
// ended it. Message is what it wrote to standard error, at most 4 KiB. Line is the line of
// its input that it complained about, counted from 1, and Text is that line; 0 and "" if
// it named none. Cause, which it wraps, is [ErrLocked], the error of the context, or nil.
type CommandError = iptool.Error

// killed reports whether a signal ended a program, so that the program may have done
// its work.
func killed(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.Killed()
}

// tooLarge reports whether a program could not pass so much to the kernel at once.
func tooLarge(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.TooLarge()
}

// refused reports whether a program or the kernel rejected the input itself.
func refused(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && !e.Killed() && e.Cause == nil && !e.TooLarge()
}
