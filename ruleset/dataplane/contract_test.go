package dataplane_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

func TestUnsupportedErrorText(t *testing.T) {
	for want, e := range map[string]*dataplane.UnsupportedError{
		"ipvs: module ip_vs is not supported on this system": {Backend: "ipvs", Feature: "module ip_vs"},
		"nftables: map with timeout for IPv6 is not supported on this system (Linux 5.15 or later is needed): file does not exist": {
			Backend: "nftables", Family: tracker.IPv6, Feature: "map with timeout", Minimum: "Linux 5.15", Err: fs.ErrNotExist,
		},
	} {
		if e.Error() != want {
			t.Errorf("%q, want %q", e.Error(), want)
		}
		if !errors.Is(e, dataplane.ErrUnsupported) || errors.Is(e, fs.ErrNotExist) != (e.Err != nil) {
			t.Errorf("%q wraps %v", want, e.Unwrap())
		}
	}
}
