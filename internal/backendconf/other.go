//go:build !linux

package backendconf

import "github.com/go-proxier/proxier/ruleset/dataplane"

// Unsupported returns the error of a backend's functions on systems other than Linux.
func Unsupported(backend string) error {
	return &dataplane.UnsupportedError{Backend: backend, Feature: "this operating system", Minimum: "Linux"}
}
