//go:build !linux

package vip

import (
	"errors"
	"io"

	"github.com/go-proxier/proxier/examples/userspace/dataplane"
)

// ErrNotSupported is returned by [New] on systems other than Linux.
var ErrNotSupported = errors.New("vip: only supported on Linux")

// Addresses is the type that New returns on Linux.
type Addresses struct {
	dataplane.Addresses
	io.Closer
}

// New returns [ErrNotSupported].
func New() (*Addresses, error) { return nil, ErrNotSupported }
