//go:build !linux

package ipvs

import (
	"context"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
)

// backend has no state: there are no backends on other systems than Linux.
type backend struct{ backendconf.Stub }

// errSystem is the error of every function on other systems than Linux.
var errSystem = backendconf.Unsupported("ipvs")

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

// SetSysctls returns a [*ruleset.UnsupportedError].
func SetSysctls(Config) error { return errSystem }

// Traffic returns a [*ruleset.UnsupportedError].
func Traffic(context.Context, Config) (*ruleset.Traffic, error) { return nil, errSystem }

// Traffic returns a [*ruleset.UnsupportedError].
func (*Backend) Traffic(context.Context) (*ruleset.Traffic, error) { return nil, errSystem }

// Tend returns a [*ruleset.UnsupportedError].
func (*Backend) Tend(context.Context, time.Time) error { return errSystem }

// Draining returns 0.
func (*Backend) Draining() int { return 0 }
