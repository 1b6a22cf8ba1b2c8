//go:build !linux

package iptables

import "github.com/go-proxier/proxier/internal/backendconf"

// openKernel returns a [*dataplane.UnsupportedError]: only Linux has iptables.
func openKernel(Config) (kernel, error) { return nil, backendconf.Unsupported("iptables") }
