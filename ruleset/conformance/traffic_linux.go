package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// tally counts the results of a world's connections, for comparison with the
// backend's counters.
type tally struct {
	mu       sync.Mutex
	services map[tracker.Key]dataplane.Counters
}

func (t *tally) note(v ruleset.Verdict) {
	if v.Port == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.services == nil {
		t.services = map[tracker.Key]dataplane.Counters{}
	}
	c := t.services[v.Port.Key]
	switch v.Action {
	case ruleset.ActionForward:
		c.Connections++
	case ruleset.ActionReject:
		c.Refused++
	case ruleset.ActionDrop:
		c.Dropped++
	}
	t.services[v.Port.Key] = c
}

func (w *connections) traffic() *dataplane.Traffic {
	w.tb.Helper()
	t := &dataplane.Traffic{}
	r, ok := w.backend.(dataplane.TrafficReader)
	if !ok || !w.does(TrafficAtOnce) {
		return t
	}
	err := w.Do(func() (err error) {
		t, err = r.Traffic(context.Background())
		return err
	})
	if err != nil {
		w.tb.Fatalf("read traffic: %v", err)
	}
	return t
}

// compare returns an error if the difference of two readings of the backend's
// counters differs from t. Refused or dropped packets may be repeated.
func (t *tally) compare(before, after *dataplane.Traffic) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys := map[tracker.Key]dataplane.Counters{}
	maps.Copy(keys, t.services)
	maps.Copy(keys, after.Services)
	var errs []error
	for k := range keys {
		want, b, a := t.services[k], before.Services[k], after.Services[k]
		wrong := func(what string, counted, want uint64) {
			errs = append(errs, fmt.Errorf("%s: the backend counted %d %s instead of %d", k, counted, what, want))
		}
		if n := a.Connections - b.Connections; after.Known.Has(dataplane.CountsConnections) && n != want.Connections {
			wrong("connections", n, want.Connections)
		}
		if n := a.Refused - b.Refused; after.Known.Has(dataplane.CountsRefused) && (n < want.Refused || n > 0 && want.Refused == 0) {
			wrong("refused packets", n, want.Refused)
		}
		if n := a.Dropped - b.Dropped; after.Known.Has(dataplane.CountsDropped) && (n < want.Dropped || n > 0 && want.Dropped == 0) {
			wrong("dropped packets", n, want.Dropped)
		}
		for _, c := range []struct {
			known dataplane.CounterSet
			what  string
			n     uint64
		}{{dataplane.CountsPackets, "packets", a.Packets - b.Packets}, {dataplane.CountsBytes, "bytes", a.Bytes - b.Bytes}} {
			if after.Known.Has(c.known) && (c.n == 0) != (want.Connections == 0) {
				wrong(c.what+" of connections", c.n, want.Connections)
			}
		}
	}
	return errors.Join(errs...)
}
