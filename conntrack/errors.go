package conntrack

import "errors"

var (
	// ErrIncomplete is wrapped by the error of a dump that may lack flows, because the
	// table changed too much while it was read (NLM_F_DUMP_INTR) or messages were lost
	// (ENOBUFS). Reading it again may succeed.
	ErrIncomplete = errors.New("incomplete dump")
	// ErrMalformed is wrapped by errors about a message of the kernel that is not a flow.
	ErrMalformed = errors.New("malformed message")
)
