package dataplane

import (
	"context"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Traffic returns the connections, and sessions of UDP, that each Service port has had in this
// process: it is a [ruleset.TrafficReader]. Connections that no endpoint took do not count.
func (b *Backend) Traffic(ctx context.Context) (*ruleset.Traffic, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, ErrClosed
	}
	out := &ruleset.Traffic{Known: ruleset.CountsConnections, Services: map[tracker.Key]ruleset.Counters{}}
	for k, s := range b.services {
		if n := s.made.Load(); n != 0 {
			out.Services[k] = ruleset.Counters{Connections: n}
		}
	}
	return out, nil
}
