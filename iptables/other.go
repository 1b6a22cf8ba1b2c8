//go:build !linux

package iptables

import (
	"context"
	"net/netip"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state has no state: there are no backends on other systems than Linux.
type state struct{ backendconf.Stub }

// errSystem is the error of every function on other systems than Linux.
var errSystem = backendconf.Unsupported("iptables")

// New returns a [*ruleset.UnsupportedError]: the package works on Linux only.
func New(context.Context, Config) (*Backend, error) { return nil, errSystem }

// Cleanup returns a [*ruleset.UnsupportedError].
func Cleanup(context.Context, Config) error { return errSystem }

// Owned returns a [*ruleset.UnsupportedError].
func Owned(context.Context, Config) (bool, error) { return false, errSystem }

// CleanupOwn returns a [*ruleset.UnsupportedError].
func CleanupOwn(context.Context, Config) error { return errSystem }

// EndpointChain returns "".
func EndpointChain(tracker.Key, netip.AddrPort) string { return "" }

// Foreign returns a [*ruleset.UnsupportedError].
func Foreign(context.Context, Config) (bool, error) { return false, errSystem }

// Lookup returns a [*ruleset.UnsupportedError].
func Lookup(context.Context, Config, ruleset.Query) (ruleset.Found, error) {
	return ruleset.Found{}, errSystem
}

// SetSysctls returns a [*ruleset.UnsupportedError].
func SetSysctls(context.Context, Config) error { return errSystem }

// Counters returns a [*ruleset.UnsupportedError].
func (*Backend) Counters() ([]Counter, error) { return nil, errSystem }

// Traffic returns a [*ruleset.UnsupportedError].
func Traffic(context.Context, Config) (*ruleset.Traffic, error) { return nil, errSystem }

// Traffic returns a [*ruleset.UnsupportedError].
func (*Backend) Traffic(context.Context) (*ruleset.Traffic, error) { return nil, errSystem }
