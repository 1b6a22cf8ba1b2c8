//go:build !linux

package agent

import (
	"log/slog"
	"os"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
)

// openNetNS returns nil: there are no network namespaces.
func openNetNS() (*os.File, error) { return nil, nil }

// setOOMScore does nothing.
func setOOMScore(int32) error { return nil }

// Needed returns nothing: there are no capabilities.
func Needed(*config.Config) []int { return nil }

// DropPrivileges does nothing.
func DropPrivileges(*slog.Logger, []int, func(modules bool), func() bool) {}
