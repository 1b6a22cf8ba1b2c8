//go:build !linux

package ipvs

import (
	"context"

	"github.com/go-proxier/proxier/internal/backendconf"
)

// open returns a [*dataplane.UnsupportedError]: the package works on Linux only.
func open(context.Context, Config, purpose) (kernel, error) {
	return nil, backendconf.Unsupported("ipvs")
}
