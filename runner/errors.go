package runner

import (
	"errors"
	"fmt"
)

// ErrRunning is returned by [Runner.Run] if another call of Run is in progress.
var ErrRunning = errors.New("runner: already running")

// PanicError reports a panic in the function that a [Runner] runs.
type PanicError struct {
	// Value is the argument of panic.
	Value any
	// Stack is the stack trace of the panic, formatted as by [runtime/debug.Stack].
	Stack []byte
}

// Error returns the value as text, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("runner: panic: %v", e.Value) }

// Unwrap returns the value if it is an error, as for a runtime panic, and nil
// otherwise.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
