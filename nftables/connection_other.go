//go:build !linux

package nftables

import "github.com/go-proxier/proxier/internal/backendconf"

// dial returns a [*dataplane.UnsupportedError]: only Linux has nf_tables.
func dial(Config) (connection, error) { return nil, backendconf.Unsupported("nftables") }
