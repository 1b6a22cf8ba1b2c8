package modes

import (
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	userspace "github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestRangesAreThoseOfTheDataPlane compares the ranges that an annotation may ask for with those that
// the data plane of the mode is offered.
func TestRangesAreThoseOfTheDataPlane(t *testing.T) {
	for mode, b := range map[string]ruleset.Limiter{
		config.ModeNFTables:    new(nftables.Backend),
		config.ModeIPTables:    new(iptables.Backend),
		config.ModeIPVS:        new(ipvs.Backend),
		config.ModeUserspace:   new(userspace.Backend),
		config.ModeKernelspace: new(winkernel.Backend),
	} {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			if got, want := objects.PortRanges(mode), b.Limits(f).PortRanges; got != want {
				t.Errorf("mode %s: annotations may ask for %v, and the data plane serves %v", mode, got, want)
			}
		}
	}
}
