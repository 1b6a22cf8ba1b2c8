//go:build linux

package ipvs

import (
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestAffinityIsShortenedToTheLimit(t *testing.T) {
	limit := ruleset.LimitsOf(&Backend{}, tracker.IPv4).Affinity
	if limit == 0 {
		t.Fatal("no limit is declared")
	}
	s := testService(func(*tracker.ServicePort) {})
	for _, c := range []struct{ affinity, want time.Duration }{
		{limit - time.Second, limit - time.Second}, {limit, limit}, {limit + time.Hour, limit},
	} {
		v := Config{}.virtual(s, c.affinity, s.Endpoints)
		if got := time.Duration(v.timeout) * time.Second; got != c.want {
			t.Errorf("affinity %v: timeout %v, want %v", c.affinity, got, c.want)
		}
	}
}
