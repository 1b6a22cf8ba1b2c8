package conntrack

import "errors"

var (
	// ErrNotSupported is what every [*NotSupportedError] is.
	ErrNotSupported = errors.New("conntrack: not supported here")
	// ErrIncomplete means that the table could not be read to its end, because the
	// kernel said that it changed too much (NLM_F_DUMP_INTR) or that messages were
	// lost (ENOBUFS). Reading it again may succeed.
	ErrIncomplete = errors.New("conntrack: incomplete dump")
	// ErrMalformed means that a message from the kernel could not be understood.
	ErrMalformed = errors.New("conntrack: malformed message")
	// ErrClosed is returned after [Cleaner.Close].
	ErrClosed = errors.New("conntrack: closed")
)

// NotSupportedError says what the system lacks. It is [ErrNotSupported].
type NotSupportedError struct {
	// Feature is what is missing.
	Feature string
	// Err is what the system said, or nil.
	Err error
}

// Error names the feature and what the system said.
func (e *NotSupportedError) Error() string {
	s := ErrNotSupported.Error() + ": " + e.Feature
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is reports whether target is [ErrNotSupported].
func (e *NotSupportedError) Is(target error) bool { return target == ErrNotSupported }

// Unwrap returns Err.
func (e *NotSupportedError) Unwrap() error { return e.Err }
