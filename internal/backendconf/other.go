//go:build !linux

package backendconf

import (
	"context"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// Unsupported returns the error of a backend's functions on systems other than Linux.
func Unsupported(backend string) error {
	return &ruleset.UnsupportedError{Backend: backend, Feature: "this operating system", Minimum: "Linux"}
}

// Stub has the methods that all kernel backends have. Each returns a
// [*ruleset.UnsupportedError], except Close, which does nothing.
type Stub struct{}

// Apply returns an error.
func (Stub) Apply(context.Context, *ruleset.Delta) error { return Unsupported("backend") }

// Check returns an error.
func (Stub) Check(context.Context) error { return Unsupported("backend") }

// Watch returns an error.
func (Stub) Watch(context.Context, time.Duration, func(error)) error { return Unsupported("backend") }

// Close returns nil.
func (Stub) Close() error { return nil }
