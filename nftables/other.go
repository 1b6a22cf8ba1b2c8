//go:build !linux

package nftables

import (
	"context"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// state is empty: on systems other than Linux there are no backends.
type state struct{ backendconf.Stub }

// errSystem is the error of every function on systems other than Linux.
var errSystem = backendconf.Unsupported("nftables")

// New returns a [*ruleset.UnsupportedError]: the package works on Linux only.
func New(context.Context, Config) (*Backend, error) { return nil, errSystem }

// Cleanup returns a [*ruleset.UnsupportedError].
func Cleanup(context.Context, Config) error { return errSystem }

// Owned returns a [*ruleset.UnsupportedError].
func Owned(context.Context, Config) (bool, error) { return false, errSystem }

// Lookup returns a [*ruleset.UnsupportedError].
func Lookup(context.Context, Config, ruleset.Query) (ruleset.Found, error) {
	return ruleset.Found{}, errSystem
}

// SyncInterfaces returns a [*ruleset.UnsupportedError].
func (*Backend) SyncInterfaces(context.Context) error { return errSystem }

// Ready returns a [*ruleset.UnsupportedError].
func Ready(context.Context, Config) (map[tracker.Key]int, error) { return nil, errSystem }

// Traffic returns a [*ruleset.UnsupportedError].
func Traffic(context.Context, Config) (*ruleset.Traffic, error) { return nil, errSystem }

// Traffic returns a [*ruleset.UnsupportedError].
func (*Backend) Traffic(context.Context) (*ruleset.Traffic, error) { return nil, errSystem }
