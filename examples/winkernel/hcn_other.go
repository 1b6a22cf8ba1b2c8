//go:build !windows

package winkernel

import "github.com/go-proxier/proxier/ruleset/dataplane"

// Open returns the service of this machine. On systems other than Windows it returns a
// [*dataplane.UnsupportedError].
func Open() (HNS, error) {
	return nil, &dataplane.UnsupportedError{Backend: "winkernel", Feature: "Host Networking Service", Minimum: "Windows Server 2019"}
}
