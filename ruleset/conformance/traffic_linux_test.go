package conformance

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestTallyComparesCounters passes readings of backends with correct and with wrong
// counters.
func TestTallyComparesCounters(t *testing.T) {
	t.Parallel()
	a, b := tracker.Key{Family: tracker.IPv4}, tracker.Key{Family: tracker.IPv6}
	var made tally
	for _, action := range []ruleset.Action{ruleset.ActionForward, ruleset.ActionForward, ruleset.ActionReject, ruleset.ActionDrop} {
		made.note(ruleset.Verdict{Action: action, Port: &ruleset.Port{Key: a}, Frontend: &ruleset.Frontend{}})
	}
	made.note(ruleset.Verdict{Action: ruleset.ActionPass})
	reading := func(known dataplane.CounterSet, c dataplane.Counters) *dataplane.Traffic {
		return &dataplane.Traffic{Known: known, Services: map[tracker.Key]dataplane.Counters{a: c}}
	}
	const all = dataplane.CountsConnections | dataplane.CountsPackets | dataplane.CountsBytes | dataplane.CountsRefused | dataplane.CountsDropped
	before := reading(all, dataplane.Counters{Connections: 5, Packets: 50, Bytes: 500, Refused: 5, Dropped: 5})
	right := dataplane.Counters{Connections: 7, Packets: 70, Bytes: 700, Refused: 6, Dropped: 7}
	for _, c := range []struct {
		edit func(*dataplane.Traffic)
		want string
	}{
		{func(*dataplane.Traffic) {}, ""},
		{func(t *dataplane.Traffic) { t.Known, t.Services = 0, nil }, ""},
		{func(t *dataplane.Traffic) {
			t.Services[a] = dataplane.Counters{Connections: 8, Packets: 70, Bytes: 700, Refused: 6, Dropped: 7}
		}, "counted 3 connections instead of 2"},
		{func(t *dataplane.Traffic) {
			t.Services[a] = dataplane.Counters{Connections: 7, Packets: 50, Bytes: 700, Refused: 6, Dropped: 7}
		}, "counted 0 packets"},
		{func(t *dataplane.Traffic) {
			t.Services[a] = dataplane.Counters{Connections: 7, Packets: 70, Bytes: 700, Refused: 5, Dropped: 7}
		}, "counted 0 refused packets"},
		{func(t *dataplane.Traffic) { t.Services[b] = dataplane.Counters{Dropped: 1} }, "counted 1 dropped packets instead of 0"},
	} {
		after := reading(all, right)
		c.edit(after)
		err := made.compare(before, after)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q", after, err, c.want)
		}
	}
}
