package iptables

import "errors"

var (
	// ErrLocked is wrapped by errors about the xtables lock, which another process held
	// for longer than [Config.LockWait]. Nothing was changed.
	ErrLocked = errors.New("iptables: another program holds the xtables lock")
	// ErrHash is wrapped by the error of a Service that is refused because its endpoints
	// must follow from a hash (see [HashRefused]).
	ErrHash = errors.New("iptables: endpoints cannot be chosen by a hash")
)

// CommandError is the failure of a program. Unless a signal ended the program, nothing
// of its input is in effect.
type CommandError struct {
	// Program is the program's path.
	Program string
	// Status is its exit status, -1 if a signal ended it.
	Status int
	// Message is what it wrote to standard error, at most 4 KiB.
	Message string
	// Line is the line of its input that it complained about, counted from 1, and Text
	// is that line; 0 and "" if it named none.
	Line int
	Text string

	summary string
	// cause is ErrLocked, the error of the context, or nil.
	cause error
	// tooLarge: the program could not pass so much to the kernel at once.
	tooLarge bool
	// indivisible: the input has one chain and cannot be divided.
	indivisible bool
}

// Error returns all fields in one line.
func (e *CommandError) Error() string { return e.summary }

// Unwrap returns [ErrLocked], the error of the context, or nil.
func (e *CommandError) Unwrap() error { return e.cause }

// killed reports whether a signal ended a program, so that the program may have done
// its work.
func killed(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.Status < 0
}

// tooLarge reports whether a program could not pass so much to the kernel at once.
func tooLarge(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.tooLarge
}

// refused reports whether a program or the kernel rejected the input itself.
func refused(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.Status >= 0 && e.cause == nil && !e.tooLarge
}
