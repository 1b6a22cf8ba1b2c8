package ipvs

import (
	"context"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
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
		config, err := Config{DrainLimit: c.limit}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
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

// TestEndpointsDrainByTheirOwnLimit ends the drain of an endpoint at the limit that its pod has, and
// of another at that of all.
func TestEndpointsDrainByTheirOwnLimit(t *testing.T) {
	t.Parallel()
	m := newMemory(netip.MustParseAddr("192.0.2.1"))
	c := Config{Families: []tracker.Family{tracker.IPv4}, DrainLimit: time.Hour}
	c.DrainLimitOf = func(_ *ruleset.Port, ep *tracker.Endpoint) time.Duration {
		if ep.Addr.Addr() == netip.MustParseAddr("10.245.0.1") {
			return time.Minute
		}
		return 0
	}
	r := newRigOn(t, memoryNode{m}, c)
	const first, second = "-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 0", "-a -t 10.96.0.1:80 -r 10.245.0.2:8080 -m -w 0"
	drains := func(after time.Duration, want ...string) {
		t.Helper()
		if err := r.backend.tend(context.Background(), time.Now().Add(after)); err != nil {
			t.Fatal(err)
		}
		for _, v := range m.Servers {
			for _, real := range v.Reals {
				real.Active = 1
			}
		}
		r.same("draining", missing(r.run("ipvsadm -Sn"), []string{"-A -t 10.96.0.1:80 -s rr", "-a -t 10.96.0.1:80 -r 10.245.0.3:8080 -m -w 1"}), want)
	}
	r.set(svc(1), 1, -1, -2, -3)
	r.sync()
	for _, v := range m.Servers {
		for _, real := range v.Reals {
			real.Active = 1
		}
	}
	r.set(svc(1), 1, -3)
	r.sync()
	drains(59*time.Second, first, second)
	drains(61*time.Second, second)
	drains(59*time.Minute, second)
	drains(61 * time.Minute)
}
