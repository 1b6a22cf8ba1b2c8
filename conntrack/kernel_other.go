//go:build !linux

package conntrack

import "runtime"

// openKernel fails: there is no nf_conntrack here.
func openKernel(int, ...uint16) (closingTable, error) {
	return nil, &NotSupportedError{Feature: "nf_conntrack on " + runtime.GOOS}
}
