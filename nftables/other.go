//go:build !linux

package nftables

import (
	"context"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// state is empty because there is no backend on this system.
type state struct{}

// errSystem is the error of every function and method on a system other than Linux.
var errSystem = &ruleset.UnsupportedError{Backend: "nftables", Feature: "this operating system", Minimum: "Linux"}

// New returns a [*ruleset.UnsupportedError].
func New(context.Context, Config) (*Backend, error) { return nil, errSystem }

// Probe returns a [*ruleset.UnsupportedError].
func Probe(context.Context, Config) error { return errSystem }

// Cleanup returns a [*ruleset.UnsupportedError].
func Cleanup(context.Context, Config) error { return errSystem }

// Owned returns a [*ruleset.UnsupportedError].
func Owned(context.Context, Config) (bool, error) { return false, errSystem }

// Lookup returns a [*ruleset.UnsupportedError].
func Lookup(context.Context, Config, ruleset.Query) (ruleset.Found, error) {
	return ruleset.Found{}, errSystem
}

// Apply returns a [*ruleset.UnsupportedError].
func (*Backend) Apply(context.Context, *ruleset.Delta) error { return errSystem }

// Check returns a [*ruleset.UnsupportedError].
func (*Backend) Check(context.Context) error { return errSystem }

// Watch returns a [*ruleset.UnsupportedError].
func (*Backend) Watch(context.Context, time.Duration, func(error)) error { return errSystem }

// SyncInterfaces returns a [*ruleset.UnsupportedError].
func (*Backend) SyncInterfaces(context.Context) error { return errSystem }

// Close does nothing.
func (*Backend) Close() error { return nil }
