//go:build !linux

package inspect

import (
	"context"
	"fmt"
	"runtime"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/inspect/toptable"
)

// readTraffic returns an error: only Linux counts the traffic of Services.
func readTraffic(context.Context, string) (toptable.Sample, error) {
	return toptable.Sample{}, fmt.Errorf("needs Linux: load balancers of %s have no counters", runtime.GOOS)
}
