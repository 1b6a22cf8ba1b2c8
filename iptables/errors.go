package iptables

import (
	"errors"

	"github.com/go-proxier/proxier/internal/iptool"
)

// ErrLocked is wrapped by errors about the xtables lock, which another process held for
// longer than 5 seconds. Nothing was changed.
var ErrLocked = iptool.ErrLocked

// CommandError is the failure of a program. Unless a signal ended the program, nothing of its input is in effect.
type CommandError struct {
	// Program is the program's path.
	Program string
	// Status is the program's exit status, -1 if a signal ended it.
	Status int
	// Message is what the program wrote to standard error, at most 4 KiB.
	Message string
	// Line is the number of the line of the input that Message names, counted from 1, or 0. Text is that line, or "".
	Line int
	Text string
	// Cause is [ErrLocked], the error of the context, or nil.
	Cause error
}

// Error returns all fields in one line.
func (e *CommandError) Error() string { return (*iptool.Error)(e).Error() }

// Unwrap returns Cause.
func (e *CommandError) Unwrap() error { return e.Cause }

// result is what became of an input of iptables-restore, or of several.
type result uint8

const (
	// done: all of it is in effect.
	done result = iota
	// refused: the program or the kernel rejects it. Nothing of it is in effect.
	refused
	// tooLarge: it is too large for one message to the kernel. Nothing of it is in effect.
	tooLarge
	// failed: it was not attempted, for example because of a lock or a lack of memory. Nothing of it is in effect.
	failed
	// unsure: all, a part, or nothing of it is in effect.
	unsure
)

// outcome is the result of a write with the error, which is nil if the write is done.
type outcome struct {
	result
	err error
}

func outcomeOf(err error) outcome {
	var e *CommandError
	switch {
	case err == nil:
		return outcome{}
	case !errors.As(err, &e):
		return outcome{failed, err}
	case (*iptool.Error)(e).Killed():
		return outcome{unsure, err}
	case e.Cause != nil, (*iptool.Error)(e).Temporary():
		return outcome{failed, err}
	case (*iptool.Error)(e).TooLarge():
		return outcome{tooLarge, err}
	}
	return outcome{refused, err}
}
