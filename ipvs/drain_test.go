package ipvs

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/must"
)

func TestDrainEndsByConnectionsOrLimit(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	for _, c := range []struct {
		name             string
		limit            time.Duration
		proto            v1.Protocol
		active, inactive int
		after            time.Duration
		want             bool
	}{
		{"TCP without connections", 0, v1.ProtocolTCP, 0, 0, 0, true},
		{"TCP with a connection", 0, v1.ProtocolTCP, 1, 0, 240 * time.Hour, false},
		{"TCP with an inactive connection", 0, v1.ProtocolTCP, 0, 1, time.Hour, false},
		{"TCP before the limit", time.Minute, v1.ProtocolTCP, 1, 0, time.Minute - 1, false},
		{"TCP at the limit", time.Minute, v1.ProtocolTCP, 1, 0, time.Minute, true},
		{"UDP immediately", 0, v1.ProtocolUDP, 5, 5, answerTime, true},
		{"UDP answers", 0, v1.ProtocolUDP, 0, 0, answerTime - 1, false},
		{"SCTP immediately", 0, v1.ProtocolSCTP, 5, 5, answerTime, true},
	} {
		config := must.Get(Config{DrainLimit: c.limit}.withDefaults())(t)
		r := config.drainRule(inet.Protocol(c.proto))
		got := r.over(start, start.Add(c.after)) || r.unused(c.active, c.inactive)
		if got != c.want {
			t.Errorf("%s: drained %t, want %t", c.name, got, c.want)
		}
	}
}

// terminate sets the endpoints -1 and -2 of a Service, of which -1 terminates.
func (r *rig) terminate(i int) {
	s := slice(i, v1.ProtocolTCP, -1, -2)
	yes, no := true, false
	s.Endpoints[0].Conditions.Ready, s.Endpoints[0].Conditions.Terminating = &no, &yes
	r.tracker.SetSlice(s)
}
