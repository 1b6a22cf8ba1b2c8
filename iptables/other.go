//go:build !linux

package iptables

import (
	"context"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// state is empty: there are no backends on other systems than Linux.
type state struct{}

// unsupported returns the error of every function on other systems than Linux.
func unsupported(c Config) error {
	if _, err := c.withDefaults(); err != nil {
		return err
	}
	return &ruleset.UnsupportedError{Backend: "iptables", Feature: "this operating system", Minimum: "Linux"}
}

// New returns a [*ruleset.UnsupportedError]: the package works on Linux only.
func New(_ context.Context, c Config) (*Backend, error) { return nil, unsupported(c) }

// Probe returns a [*ruleset.UnsupportedError], as New.
func Probe(_ context.Context, c Config) error { return unsupported(c) }

// Cleanup returns a [*ruleset.UnsupportedError], as New.
func Cleanup(_ context.Context, c Config) error { return unsupported(c) }

// Owned returns a [*ruleset.UnsupportedError], as New.
func Owned(_ context.Context, c Config) (bool, error) { return false, unsupported(c) }

// Lookup returns a [*ruleset.UnsupportedError], as New.
func Lookup(_ context.Context, c Config, _ ruleset.Query) (ruleset.Found, error) {
	return ruleset.Found{}, unsupported(c)
}

// SetSysctls returns a [*ruleset.UnsupportedError], as New.
func SetSysctls(c Config) error { return unsupported(c) }

// Apply returns a [*ruleset.UnsupportedError], as New.
func (b *Backend) Apply(context.Context, *ruleset.Delta) error { return unsupported(Config{}) }

// Check returns a [*ruleset.UnsupportedError], as New.
func (b *Backend) Check(context.Context) error { return unsupported(Config{}) }

// Watch returns a [*ruleset.UnsupportedError], as New.
func (b *Backend) Watch(context.Context, time.Duration, func(error)) error {
	return unsupported(Config{})
}

// Counters returns a [*ruleset.UnsupportedError], as New.
func (b *Backend) Counters() ([]Counter, error) { return nil, unsupported(Config{}) }

// Close does nothing.
func (b *Backend) Close() error { return nil }
