package conntrack

import "errors"

var (
	// ErrIncomplete is wrapped by the error of a dump in which flows may be missing,
	// because the table changed too much during the dump (NLM_F_DUMP_INTR) or messages
	// were lost (ENOBUFS). Another dump may succeed.
	ErrIncomplete = errors.New("incomplete dump")
	// ErrMalformed is wrapped by errors about a message of the kernel that cannot be
	// decoded.
	ErrMalformed = errors.New("malformed message")
)
