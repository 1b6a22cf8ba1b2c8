//go:build !linux

package demo

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
)

// Command returns a verb demo that prints that it needs Linux.
func Command(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use: demoUse, Short: demoShort, FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		RunE: func(*cobra.Command, []string) error {
			fmt.Fprintf(p.Diag, "nodeproxy demo: needs Linux: it builds a cluster of network namespaces, which %s does not have\n", runtime.GOOS)
			return cli.StatusError(3)
		},
	}
}
