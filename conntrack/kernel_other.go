//go:build !linux

package conntrack

import (
	"os"

	"github.com/go-proxier/proxier/ruleset"
)

// openKernel fails: only Linux has nf_conntrack.
func openKernel(*os.File, ...uint16) (closingTable, error) {
	return nil, &ruleset.UnsupportedError{Backend: "conntrack", Feature: "this operating system", Minimum: "Linux"}
}
