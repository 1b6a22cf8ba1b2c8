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
	// ErrLocked is wrapped by the error of a tool that waited longer than
	// Config.LockWait for the xtables lock. The tool changed nothing.
	ErrLocked = errors.New("another program holds the xtables lock")
	// ErrUnreadable is wrapped by the error of [Tool.Save] about a table of nf_tables in which another program, such
	// as nft, has added a rule that iptables cannot express. iptables-restore works.
	ErrUnreadable = errors.New("iptables-save cannot print a rule that nft can list")
	// errIncomplete is wrapped by the error of [Tool.Save] about an output that ends within a table.
	errIncomplete = errors.New("output ends within a table")
)

// Error is the error of a tool. Unless the tool was killed, its input is not in effect.
type Error struct {
	// Program is the tool's path.
	Program string
	// Status is the tool's exit status, -1 if a signal ended it.
	Status int
	// Message is the tool's standard error, at most 4 KiB.
	Message string
	// Line is the number of the input's line that Message names, from 1, or 0. Text is
	// that line.
	Line int
	Text string
	// Cause is [ErrLocked], [ErrUnreadable], the error of the context, or nil.
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

// Killed reports whether a signal ended the tool. The input may or may not be in effect
// then.
func (e *Error) Killed() bool { return e.Status < 0 }

// Temporary reports whether the tool lacked something of the system, such as memory, before it read
// its input.
func (e *Error) Temporary() bool {
	_, reason, _ := strings.Cut(e.Message, "Could not fetch rule set generation id: ")
	for _, s := range []string{
		"Memory allocation problem", "No buffer space available", "Interrupted system call",
		"Resource temporarily unavailable", "Device or resource busy",
	} {
		if strings.HasPrefix(reason, s) {
			return true
		}
	}
	return false
}

// TooLarge reports whether the input was too large for one message to the kernel.
func (e *Error) TooLarge() bool {
	return strings.Contains(e.Message, "Message too long") || strings.Contains(e.Message, "No buffer space")
}
