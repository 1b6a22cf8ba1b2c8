package ipvs

import (
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// testForwardingIsReadBack writes real servers with each forwarding, and changes it.
func testForwardingIsReadBack(t *testing.T) {
	k := newRig(t, newHost(t), Config{}).backend.kernel
	for family, reals := range map[tracker.Family][2]netip.AddrPort{
		tracker.IPv4: {netip.MustParseAddrPort("10.245.0.1:80"), netip.MustParseAddrPort("10.245.0.2:80")},
		tracker.IPv6: {netip.MustParseAddrPort("[2001:db8::1]:80"), netip.MustParseAddrPort("[2001:db8::2]:80")},
	} {
		for _, key := range []virtualKey{{family: family, mark: 77}, {family: family, proto: inet.TCP, at: reals[1]}} {
			if err := k.addVirtual(key, virtual{scheduler: RoundRobin}); err != nil {
				t.Fatal(err)
			}
			if err := k.addReal(key, real{at: reals[0], weight: 1}); err != nil {
				t.Fatal(err)
			}
			for _, how := range []Forwarding{ForwardingGUE, ForwardingTunnel, ForwardingGRE, ForwardingDirect, ForwardingGUE, ForwardingTranslated} {
				want := real{at: reals[1], weight: 7, forwarding: how}
				if err := k.addReal(key, want); err != nil { // the second time it exists
					t.Errorf("%s, %v: %v", key, how, err)
				}
				found := map[netip.AddrPort]real{}
				if err := k.reals(key, func(r real) { found[r.at] = r }); err != nil {
					t.Error(err)
				}
				if found[reals[1]] != want || found[reals[0]].forwarding != ForwardingTranslated || len(found) != 2 {
					t.Errorf("%s: %+v, want %+v", key, found, want)
				}
			}
		}
	}
}
