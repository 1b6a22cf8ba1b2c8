package dataplane

import (
	"context"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Traffic implements [ruleset.TrafficReader]. It returns the numbers of TCP connections and
// UDP sessions of each Service port in this process. Connections that no endpoint accepted do
// not count.
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
