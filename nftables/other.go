//go:build !linux

package nftables

import (
	"context"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// state is empty: on systems other than Linux there are no backends.
type state struct{ backendconf.Stub }

// errSystem is the error of every function on systems other than Linux.
var errSystem = backendconf.Unsupported("nftables")

// New returns a [*dataplane.UnsupportedError]: the package works on Linux only.
func New(context.Context, Config) (*Backend, error) { return nil, errSystem }

// Cleanup returns a [*dataplane.UnsupportedError].
func Cleanup(context.Context, Config) error { return errSystem }

// Owned returns a [*dataplane.UnsupportedError].
func Owned(context.Context, Config) (bool, error) { return false, errSystem }

// Lookup returns a [*dataplane.UnsupportedError].
func Lookup(context.Context, Config, dataplane.Query) (dataplane.Found, error) {
	return dataplane.Found{}, errSystem
}

// Ready returns a [*dataplane.UnsupportedError].
func Ready(context.Context, Config) (map[tracker.Key]int, error) { return nil, errSystem }

// Traffic returns a [*dataplane.UnsupportedError].
func Traffic(context.Context, Config) (*dataplane.Traffic, error) { return nil, errSystem }

// Traffic returns a [*dataplane.UnsupportedError].
func (*Backend) Traffic(context.Context) (*dataplane.Traffic, error) { return nil, errSystem }
