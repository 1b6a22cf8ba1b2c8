// Package sysctl reads and writes kernel parameters. Parameters below net/ belong to the
// calling thread's network namespace.
package sysctl

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

func path(name string) string { return filepath.Join("/proc/sys", filepath.FromSlash(name)) }

// Get returns the value of a parameter, without the end of the line. The name is the path
// below /proc/sys.
func Get(name string) (string, error) {
	b, err := os.ReadFile(path(name))
	return strings.TrimSpace(string(b)), err
}

// Set writes a parameter unless it has the value already. So it succeeds with a read-only
// /proc/sys if an earlier process set the parameter.
func Set(name, value string) error {
	old, err := Get(name)
	if err == nil && old == value {
		return nil
	}
	if err == nil {
		err = os.WriteFile(path(name), []byte(value), 0)
	}
	if err != nil {
		return fmt.Errorf("cannot set %s to %s: %w", name, value, err)
	}
	return nil
}
