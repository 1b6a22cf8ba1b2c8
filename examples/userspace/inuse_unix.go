//go:build unix

package main

import (
	"errors"
	"syscall"
)

// inUse reports whether another program uses an address and port.
func inUse(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }
