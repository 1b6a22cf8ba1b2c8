//go:build !linux

package conntrack

import (
	"context"
	"net/netip"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/tracker"
)

// kernel is empty: only Linux has nf_conntrack.
type kernel struct{}

var errSystem = backendconf.Unsupported("conntrack")

// OpenKernelTable returns a [*github.com/go-proxier/proxier/ruleset/dataplane.UnsupportedError].
func OpenKernelTable(Config) (*KernelTable, error) { return nil, errSystem }

// Dump returns a [*github.com/go-proxier/proxier/ruleset/dataplane.UnsupportedError].
func (*KernelTable) Dump(context.Context, tracker.Family, func(*Flow)) error { return errSystem }

// Delete returns a [*github.com/go-proxier/proxier/ruleset/dataplane.UnsupportedError].
func (*KernelTable) Delete(context.Context, []Flow) (int, error) { return 0, errSystem }

// LocalAddrs returns a [*github.com/go-proxier/proxier/ruleset/dataplane.UnsupportedError].
func (*KernelTable) LocalAddrs(context.Context, tracker.Family) ([]netip.Addr, error) {
	return nil, errSystem
}

// Close does nothing.
func (*KernelTable) Close() error { return nil }
