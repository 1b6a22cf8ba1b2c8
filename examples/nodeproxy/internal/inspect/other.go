//go:build !linux

package inspect

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
)

// TraceCommand returns a verb trace that returns an error.
func TraceCommand(*cli.Program) *cobra.Command {
	return &cobra.Command{
		Use: traceUse, Short: traceShort, FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		RunE: func(*cobra.Command, []string) error {
			return fmt.Errorf("needs Linux: it follows packets by nf_tables or connection tracking, which %s does not have; nodeproxy explain works", runtime.GOOS)
		},
	}
}

// readTraffic returns an error: only Linux counts the traffic of Services.
func readTraffic(context.Context, string) (sample, error) {
	return sample{}, fmt.Errorf("needs Linux: load balancers of %s have no counters", runtime.GOOS)
}

// localAddresses returns all of the node's own addresses.
func localAddresses() (out []netip.Addr, _ error) {
	list, err := net.InterfaceAddrs()
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out, err
}
