package modes

import (
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/annotations"
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
