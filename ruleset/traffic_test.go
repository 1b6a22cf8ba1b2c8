package ruleset_test

import (
	"context"
	"errors"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// counting is a backend with counters.
type counting struct {
	ruleset.BackendFunc
	traffic *ruleset.Traffic
	err     error
}

func (c counting) Traffic(context.Context) (*ruleset.Traffic, error) { return c.traffic, c.err }

func TestByFamilyJoinsTraffic(t *testing.T) {
	none := ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
	with := func(f tracker.Family, known ruleset.CounterSet) counting {
		return counting{none, &ruleset.Traffic{Known: known, Services: map[tracker.Key]ruleset.Counters{{Family: f}: {Connections: uint64(f)}}}, nil}
	}
	v4 := with(tracker.IPv4, ruleset.CountsConnections|ruleset.CountsBytes)
	v6 := with(tracker.IPv6, ruleset.CountsConnections|ruleset.CountsPackets)
	for _, c := range []struct {
		name     string
		v4, v6   ruleset.Backend
		known    ruleset.CounterSet
		services int
	}{
		{"both", v4, v6, ruleset.CountsConnections, 2},
		{"one", v4, nil, ruleset.CountsConnections | ruleset.CountsBytes, 1},
		{"one counts", v4, none, 0, 1},
		{"none", nil, nil, 0, 0},
	} {
		got, err := ruleset.ByFamily(c.v4, c.v6).(ruleset.TrafficReader).Traffic(t.Context())
		if err != nil || got.Known != c.known || len(got.Services) != c.services {
			t.Errorf("%s: %+v, error %v", c.name, got, err)
		}
	}
	v6.err = errors.New("no kernel")
	if _, err := ruleset.ByFamily(v4, v6).(ruleset.TrafficReader).Traffic(t.Context()); err != v6.err {
		t.Errorf("error %v, want %v", err, v6.err)
	}
}
