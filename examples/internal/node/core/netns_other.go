//go:build !linux

package core

import (
	"errors"
	"os"
)

// openNetNS returns nil: there are no network namespaces.
func openNetNS() (*os.File, error) { return nil, nil }

// doIn returns an error: there are no network namespaces.
func doIn(*os.File, func() error) error { return errors.ErrUnsupported }
