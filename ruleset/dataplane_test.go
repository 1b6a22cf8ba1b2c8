package ruleset_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestMasqueradeMarkHasOneBit(t *testing.T) {
	for m, want := range map[ruleset.MasqueradeMark]uint32{0: 0x4000, ruleset.MasqueradeBit(0): 1, ruleset.MasqueradeBit(31): 1 << 31, 0x80: 0x80} {
		if got, err := m.Value(); got != want || err != nil {
			t.Errorf("%#x: %#x, %v, want %#x", uint32(m), got, err, want)
		}
	}
	for _, m := range []ruleset.MasqueradeMark{3, 0xffffffff, ruleset.MasqueradeBit(32), ruleset.MasqueradeBit(-1)} {
		if got, err := m.Value(); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%#x: %#x, %v, want ErrConfig", uint32(m), got, err)
		}
	}
}

func TestUnsupportedErrorText(t *testing.T) {
	for want, e := range map[string]*ruleset.UnsupportedError{
		"ipvs: module ip_vs is not supported on this system": {Backend: "ipvs", Feature: "module ip_vs"},
		"nftables: map with timeout for IPv6 is not supported on this system (Linux 5.15 or later is needed): file does not exist": {
			Backend: "nftables", Family: tracker.IPv6, Feature: "map with timeout", Minimum: "Linux 5.15", Err: fs.ErrNotExist,
		},
	} {
		if e.Error() != want {
			t.Errorf("%q, want %q", e.Error(), want)
		}
		if !errors.Is(e, ruleset.ErrUnsupported) || errors.Is(e, fs.ErrNotExist) != (e.Err != nil) {
			t.Errorf("%q wraps %v", want, e.Unwrap())
		}
	}
}
