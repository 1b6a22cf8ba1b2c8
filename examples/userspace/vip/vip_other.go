//go:build !linux

package vip

import (
	"errors"
	"net/netip"
)

// ErrNotSupported is returned by [New] on systems other than Linux.
var ErrNotSupported = errors.New("vip: only supported on Linux")

// Addresses is the type that New returns on Linux.
type Addresses struct{}

// New returns [ErrNotSupported].
func New() (*Addresses, error) { return nil, ErrNotSupported }

// Close does nothing.
func (*Addresses) Close() error { return nil }

// Own returns [ErrNotSupported].
func (*Addresses) Own() ([]netip.Addr, error) { return nil, ErrNotSupported }

// Permitted returns [ErrNotSupported].
func (*Addresses) Permitted() error { return ErrNotSupported }

// Local reports false.
func (*Addresses) Local(netip.Addr) bool { return false }

// Hold returns [ErrNotSupported].
func (*Addresses) Hold(netip.Addr) error { return ErrNotSupported }

// Release returns [ErrNotSupported].
func (*Addresses) Release(netip.Addr) error { return ErrNotSupported }

// Held returns [ErrNotSupported].
func (*Addresses) Held() ([]netip.Addr, error) { return nil, ErrNotSupported }
