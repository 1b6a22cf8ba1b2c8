//go:build !linux

package socketlb

import (
	"context"
	"iter"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// state is empty because there is no backend on this system.
type state struct{}

// errSystem is the error of every function and method on a system other than Linux.
var errSystem = &dataplane.UnsupportedError{Backend: "socketlb", Feature: "this operating system", Minimum: "Linux"}

// New returns a [*dataplane.UnsupportedError].
func New(context.Context, Config) (*Backend, error) { return nil, errSystem }

// Probe returns a [*dataplane.UnsupportedError].
func Probe(context.Context, Config) error { return errSystem }

// Cleanup returns a [*dataplane.UnsupportedError].
func Cleanup(context.Context, Config) error { return errSystem }

// Owned returns a [*dataplane.UnsupportedError].
func Owned(context.Context, Config) (bool, error) { return false, errSystem }

// TemporaryDir returns a [*dataplane.UnsupportedError].
func TemporaryDir() (string, func() error, error) { return "", nil, errSystem }

// RootCgroup returns a [*dataplane.UnsupportedError].
func RootCgroup() (string, error) { return "", errSystem }

// Apply returns a [*dataplane.UnsupportedError].
func (*Backend) Apply(context.Context, *ruleset.Delta) error { return errSystem }

// Check returns a [*dataplane.UnsupportedError].
func (*Backend) Check(context.Context) error { return errSystem }

// Watch returns a [*dataplane.UnsupportedError].
func (*Backend) Watch(context.Context, time.Duration, func(error)) error { return errSystem }

// Counters returns a [*dataplane.UnsupportedError].
func (*Backend) Counters() (Counters, error) { return Counters{}, errSystem }

// Traffic returns a [*dataplane.UnsupportedError].
func Traffic(context.Context, Config, iter.Seq[tracker.Key]) (*dataplane.Traffic, error) {
	return nil, errSystem
}

// Traffic returns a [*dataplane.UnsupportedError].
func (*Backend) Traffic(context.Context) (*dataplane.Traffic, error) { return nil, errSystem }

// Close does nothing.
func (*Backend) Close() error { return nil }
