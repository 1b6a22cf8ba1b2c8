// Package iptool runs the iptables tools: iptables-restore, iptables-save and their
// relatives, of either implementation and family, in a network namespace.
package iptool

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrUnsupported is wrapped by errors about a tool that is missing or too old.
	ErrUnsupported = errors.New("iptables tools cannot be used")
	// ErrLocked is wrapped by errors about the xtables lock, which another process
	// held for longer than Config.LockWait. The tool changed nothing.
	ErrLocked = errors.New("another program holds the xtables lock")
)

// Error is a tool's failure. Unless it was killed, nothing of its input is in effect.
type Error struct {
	// Program is the tool's path.
	Program string
	// Status is its exit status, -1 if a signal ended it.
	Status int
	// Message is what it wrote to standard error, at most 4 KiB.
	Message string
	// Line is the line of its input that Message names, counted from 1, 0 if it names
	// none. Text is that line.
	Line int
	Text string
	// Cause is [ErrLocked], the error of the context, or nil.
	Cause error
}

// Error returns all fields in one line.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: ", e.Program)
	if e.Cause != nil {
		fmt.Fprintf(&b, "%v: ", e.Cause)
	}
	fmt.Fprintf(&b, "exit status %d: %s", e.Status, strings.Join(strings.Fields(e.Message), " "))
	if e.Text != "" {
		fmt.Fprintf(&b, " (line %d: %s)", e.Line, e.Text)
	}
	return b.String()
}

// Unwrap returns Cause.
func (e *Error) Unwrap() error { return e.Cause }

// Killed reports whether a signal ended the tool, so that it may or may not have done
// its work.
func (e *Error) Killed() bool { return e.Status < 0 }

// TooLarge reports whether the tool could not hand the kernel so much at once.
func (e *Error) TooLarge() bool {
	return strings.Contains(e.Message, "Message too long") || strings.Contains(e.Message, "No buffer space")
}
