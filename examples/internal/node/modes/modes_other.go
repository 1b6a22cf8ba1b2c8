//go:build !linux

package modes

import (
	"context"
	"log/slog"
	"math"
	"net"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
)

// All returns all modes for a configuration.
func All(c *config.Config) []Mode { return []Mode{Kernelspace(c)} }

// OtherRules returns nothing.
func OtherRules(context.Context, bool, *slog.Logger) (map[takeover.Kind]uint64, error) {
	return nil, nil
}

// Cleanable returns the modes: --cleanup may remove what all of them left.
func Cleanable(_ context.Context, modes []Mode, _ *config.Config, _ func(ctx context.Context, network, address string) (net.Conn, error), _ *slog.Logger) ([]Mode, error) {
	return modes, nil
}

// ChooseFlavor returns the zero Flavor: only Linux has iptables.
func ChooseFlavor(context.Context, *config.Config) Flavor { return Flavor{} }

// LoadModules does nothing.
func (m Mode) LoadModules(context.Context, *config.Config, *slog.Logger) {}

// ResetSysctls does nothing.
func ResetSysctls(context.Context, string, *slog.Logger) error { return nil }

// HasIPv6 returns true. The node's addresses and the data plane decide.
func HasIPv6() bool { return true }

// OpenFiles returns the number of files that the process may open: any.
func OpenFiles() uint64 { return math.MaxUint64 }
