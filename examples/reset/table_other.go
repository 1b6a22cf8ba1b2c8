//go:build !linux

package reset

import (
	"context"
	"os"

	"github.com/go-proxier/proxier/ruleset/dataplane"
)

func open(*os.File) (table, error) {
	return nil, &dataplane.UnsupportedError{Backend: "reset", Feature: "nf_tables"}
}

func cleanup(context.Context, *os.File) error { return nil }
