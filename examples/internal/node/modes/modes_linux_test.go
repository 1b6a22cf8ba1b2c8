package modes

import (
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/annotations"
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

// TestServiceCanOnlyShortenDrainLimit combines a Service's drain limit with the operator's.
func TestServiceCanOnlyShortenDrainLimit(t *testing.T) {
	for _, c := range []struct{ operator, service, want time.Duration }{
		{0, 0, 0},
		{time.Minute, 0, 0}, // the operator's
		{0, time.Hour, time.Hour},
		{time.Minute, time.Second, time.Second},
		{time.Minute, time.Hour, time.Minute},
	} {
		p := &ruleset.Port{Spec: &tracker.ServicePort{}}
		if c.service != 0 {
			p.Spec.Ext = annotations.Server{DrainLimit: c.service}
		}
		if got := drainLimitOf(c.operator)(p, nil); got != c.want {
			t.Errorf("%v of at most %v: %v, want %v", c.service, c.operator, got, c.want)
		}
	}
}

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
