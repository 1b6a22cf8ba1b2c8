package dataplane_test

import (
	"context"
	"errors"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// counting is a backend with counters.
type counting struct {
	ruleset.BackendFunc
	traffic *dataplane.Traffic
	err     error
}

func (c counting) Traffic(context.Context) (*dataplane.Traffic, error) { return c.traffic, c.err }

func TestByFamilyJoinsTraffic(t *testing.T) {
	none := ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil })
	with := func(f tracker.Family, known dataplane.CounterSet) counting {
		return counting{none, &dataplane.Traffic{Known: known, Services: map[tracker.Key]dataplane.Counters{{Family: f}: {Connections: uint64(f)}}}, nil}
	}
	v4 := with(tracker.IPv4, dataplane.CountsConnections|dataplane.CountsBytes)
	v6 := with(tracker.IPv6, dataplane.CountsConnections|dataplane.CountsPackets)
	for _, c := range []struct {
		name     string
		v4, v6   ruleset.Backend
		known    dataplane.CounterSet
		services int
	}{
		{"both", v4, v6, dataplane.CountsConnections, 2},
		{"one", v4, nil, dataplane.CountsConnections | dataplane.CountsBytes, 1},
		{"one counts", v4, none, 0, 1},
		{"none", nil, nil, 0, 0},
	} {
		got, err := dataplane.ByFamily(c.v4, c.v6).(dataplane.TrafficReader).Traffic(t.Context())
		if err != nil || got.Known != c.known || len(got.Services) != c.services {
			t.Errorf("%s: %+v, error %v", c.name, got, err)
		}
	}
	v6.err = errors.New("no kernel")
	if _, err := dataplane.ByFamily(v4, v6).(dataplane.TrafficReader).Traffic(t.Context()); err != v6.err {
		t.Errorf("error %v, want %v", err, v6.err)
	}
}
