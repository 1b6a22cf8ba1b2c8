package dataplane_test

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

func TestMasqueradeMarkHasOneBit(t *testing.T) {
	for m, want := range map[dataplane.MasqueradeMark]uint32{0: 0x4000, 1: 1, 1 << 31: 1 << 31, 0x80: 0x80} {
		if got, err := m.Value(); got != want || err != nil {
			t.Errorf("%#x: %#x, %v, want %#x", uint32(m), got, err, want)
		}
	}
	for _, m := range []dataplane.MasqueradeMark{3, 0xffffffff} {
		if got, err := m.Value(); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%#x: %#x, %v, want ErrConfig", uint32(m), got, err)
		}
	}
}

func TestMasqueradeBitIsInRange(t *testing.T) {
	for bit, want := range map[int]dataplane.MasqueradeMark{0: 1, 14: dataplane.DefaultMasqueradeMark, 31: 1 << 31} {
		if got, err := dataplane.MasqueradeBit(bit); got != want || err != nil {
			t.Errorf("bit %d: %#x, %v, want %#x", bit, uint32(got), err, uint32(want))
		}
	}
	for _, bit := range []int{-1, 32} {
		if got, err := dataplane.MasqueradeBit(bit); got != 0 || !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("bit %d: %#x, %v, want ErrConfig", bit, uint32(got), err)
		}
	}
}

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
