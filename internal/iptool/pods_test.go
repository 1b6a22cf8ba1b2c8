package iptool

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestPodMatches(t *testing.T) {
	const longest = "a23456789012345"
	for _, c := range []struct {
		local ruleset.LocalTraffic
		want  []string
	}{
		{ruleset.LocalTraffic{}, nil},
		{ruleset.LocalTraffic{Bridge: "cni0"}, []string{"-i cni0"}},
		{ruleset.LocalTraffic{InterfacePrefix: "veth"}, []string{"-i veth+"}},
		{ruleset.LocalTraffic{InterfacePrefix: longest}, []string{"-i " + longest}},
		{ruleset.LocalTraffic{CIDRs: []netip.Prefix{
			netip.MustParsePrefix("10.244.1.1/16"), netip.MustParsePrefix("fd00::/64"), netip.MustParsePrefix("10.9.0.0/16"),
		}}, []string{"-s 10.244.0.0/16", "-s 10.9.0.0/16"}},
	} {
		if got, err := PodMatches(c.local, tracker.IPv4); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, %v, want %q", c.local, got, err, c.want)
		}
	}
	for _, name := range []string{"a b", "x\ny", "cni0/", "-j", longest + "6", "veth+", `a"b`, `a\b`, "!a", "\xff"} {
		for _, l := range []ruleset.LocalTraffic{{Bridge: name}, {InterfacePrefix: name}} {
			if got, err := PodMatches(l, tracker.IPv4); err == nil {
				t.Errorf("%+v: %q", l, got)
			}
		}
	}
}
