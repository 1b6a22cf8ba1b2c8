//go:build !linux

package backendconf

import (
	"context"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// Unsupported returns the error of a backend's functions on systems other than Linux.
func Unsupported(backend string) error {
	return &dataplane.UnsupportedError{Backend: backend, Feature: "this operating system", Minimum: "Linux"}
}

// Stub has the methods that all kernel backends have. Each returns a
// [*dataplane.UnsupportedError], except Close, which does nothing.
type Stub struct{}

// Apply returns an error.
func (Stub) Apply(context.Context, *ruleset.Delta) error { return Unsupported("backend") }

// Check returns an error.
func (Stub) Check(context.Context) error { return Unsupported("backend") }

// Watch returns an error.
func (Stub) Watch(context.Context, time.Duration, func(error)) error { return Unsupported("backend") }

// Close returns nil.
func (Stub) Close() error { return nil }
