//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/tracker"
)

var (
	// ErrUnsupported is wrapped by errors about a program that is missing or too old,
	// or a kernel that lacks a feature.
	ErrUnsupported = errors.New("iptables: not supported here")
	// ErrLocked is wrapped by errors about the xtables lock, which another process held
	// for longer than [Config.LockWait]. Nothing was changed.
	ErrLocked = errors.New("iptables: another program holds the xtables lock")
)

// CommandError is the refusal of a program. Nothing of the program's input is in
// effect.
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

	failure *iptool.Error
	// indivisible: its input has one chain and cannot be divided.
	indivisible bool
}

// Error returns all fields in one line.
func (e *CommandError) Error() string { return e.failure.Error() }

// Unwrap returns [ErrLocked], the error of the context, or nil.
func (e *CommandError) Unwrap() error {
	if errors.Is(e.failure, iptool.ErrLocked) {
		return ErrLocked
	}
	return e.failure.Cause
}

// commandError returns the error of a tool that was given an input, or nil for none, as
// this package's errors.
func commandError(err error, in *input) error {
	var e *iptool.Error
	switch {
	case errors.As(err, &e):
		return &CommandError{
			Program: e.Program, Status: e.Status, Message: e.Message, Line: e.Line, Text: e.Text,
			failure: e, indivisible: in != nil && in.chains <= 1,
		}
	case errors.Is(err, iptool.ErrUnsupported):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	case err != nil:
		return fmt.Errorf("iptables: %w", err)
	}
	return nil
}

// tool runs the programs of one family, in one network namespace.
type tool struct{ *iptool.Tool }

// findTool finds the programs of a family and asks them for their version.
func findTool(ctx context.Context, c Config, f tracker.Family, ns *netns.Namespace) (tool, error) {
	names := c.tools(f)
	t, err := iptool.Find(ctx, iptool.Config{
		Family: f, Flavour: string(c.Flavour), Restore: names.Restore, Save: names.Save, Namespace: ns,
		LockFile: c.LockFile, LockWait: c.LockWait, Timeout: c.Timeout,
	})
	return tool{t}, commandError(err, nil)
}

// apply applies an input.
func (t tool) apply(ctx context.Context, in *input) error {
	return commandError(t.Restore(ctx, in.text.Bytes()), in)
}

// tooLarge reports whether a program could not hand the kernel so much at once.
func tooLarge(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.failure.TooLarge()
}

// killed reports whether a program was ended by a signal, so that it may have done its
// work.
func killed(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.failure.Killed()
}

// refused reports whether an error is a refusal of the input itself, of which nothing
// is in effect, rather than a failure to have it read.
func refused(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && !e.failure.Killed() && e.failure.Cause == nil && !e.failure.TooLarge()
}
