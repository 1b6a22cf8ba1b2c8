//go:build linux

package ipvs

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
)

func TestDrainEndsByConnectionsOrLimit(t *testing.T) {
	start := time.Unix(1000, 0)
	for _, c := range []struct {
		name             string
		d                Drain
		proto            v1.Protocol
		active, inactive int
		after            time.Duration
		want             bool
	}{
		{"TCP without connections", Drain{}, v1.ProtocolTCP, 0, 0, 0, true},
		{"TCP with a connection", Drain{}, v1.ProtocolTCP, 1, 0, 240 * time.Hour, false},
		{"TCP with an inactive connection", Drain{}, v1.ProtocolTCP, 0, 1, time.Hour, false},
		{"TCP before the limit", Drain{Limit: time.Minute}, v1.ProtocolTCP, 1, 0, time.Minute - 1, false},
		{"TCP at the limit", Drain{Limit: time.Minute}, v1.ProtocolTCP, 1, 0, time.Minute, true},
		{"TCP at once", Drain{Gracefully: []v1.Protocol{}}, v1.ProtocolTCP, 1, 1, answerTime, true},
		{"UDP at once", Drain{}, v1.ProtocolUDP, 5, 5, answerTime, true},
		{"UDP answers", Drain{}, v1.ProtocolUDP, 0, 0, answerTime - 1, false},
		{"SCTP at once", Drain{}, v1.ProtocolSCTP, 5, 5, answerTime, true},
		{"UDP gracefully", Drain{Gracefully: []v1.Protocol{v1.ProtocolUDP}}, v1.ProtocolUDP, 0, 5, time.Hour, false},
		{"SCTP gracefully", Drain{Gracefully: []v1.Protocol{v1.ProtocolSCTP}}, v1.ProtocolSCTP, 0, 0, 0, true},
	} {
		config, err := Config{Drain: c.d}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		r := config.Drain.rule(inet.Protocol(c.proto))
		got := r.over(start, start.Add(c.after)) || r.unused(c.active, c.inactive)
		if got != c.want {
			t.Errorf("%s: drained %t, want %t", c.name, got, c.want)
		}
	}
}
