package runner

import (
	"errors"
	"fmt"
)

// ErrRunning is returned by [Runner.Run] while another call of it is under way.
var ErrRunning = errors.New("runner: already running")

// PanicError is a panic of the function that a [Runner] runs, as an error.
type PanicError struct {
	// Value is what was given to panic.
	Value any
	// Stack is the goroutine's stack at the panic, as [runtime/debug.Stack] formats
	// it.
	Stack []byte
}

// Error returns the value, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("runner: panic: %v", e.Value) }

// Unwrap returns the value if it is an error, as that of a runtime panic is.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
