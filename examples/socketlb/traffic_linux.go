package socketlb

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// connectionsFile is the file of the map with the connections of each Service port.
const connectionsFile = "connections"

// Traffic reads the number of translated connections of each Service port. It counts
// connections alone, because the programs see no packets. Connections that are left to
// the backend behind are among that backend's counters, so the sum of both is the number
// of all connections.
//
// The counters survive changes and restarts, and are deleted with their Service. Service ports
// beyond 65,536 are not counted. The error is ctx's, wraps [os.ErrClosed], or comes from reading the map.
func (b *Backend) Traffic(ctx context.Context) (*dataplane.Traffic, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errClosed
	}
	return traffic(b.maps[connectionsFile], maps.Values(maps.Collect(b.names.All())))
}

// Traffic reads the counters that a [Backend] with the same Config.Dir keeps, in this process or
// another, as [Backend.Traffic] does. It changes nothing. The kernel does not store names of
// Services, so the result has the names of the given Service ports. The error wraps
// [dataplane.ErrNoRules] if there is no backend.
func Traffic(ctx context.Context, c Config, services iter.Seq[tracker.Key]) (*dataplane.Traffic, error) {
	c, err := c.withDefaults(ctx)
	if err != nil {
		return nil, err
	}
	// Without the file there is no need for a kernel with BPF.
	file := filepath.Join(c.Dir, connectionsFile)
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("socketlb: cannot read traffic: %w", dataplane.ErrNoRules)
	}
	m, err := ebpf.LoadPinnedMap(file, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("socketlb: cannot read traffic: %w", err)
	}
	defer m.Close()
	return traffic(m, services)
}

func traffic(m *ebpf.Map, services iter.Seq[tracker.Key]) (*dataplane.Traffic, error) {
	counted, err := readConnections(m)
	if err != nil {
		return nil, err
	}
	out := &dataplane.Traffic{Known: dataplane.CountsConnections, Services: map[tracker.Key]dataplane.Counters{}}
	for k := range services {
		if n := counted[idOf(k)]; n != (connections{}) {
			out.Services[k] = dataplane.Counters{Connections: n.Node + n.Pods}
		}
	}
	return out, nil
}

// readConnections returns the connections of each Service port, over all processors.
func readConnections(m *ebpf.Map) (map[serviceID]connections, error) {
	out := map[serviceID]connections{}
	var id serviceID
	var each []connections
	entries := m.Iterate()
	for entries.Next(&id, &each) {
		var sum connections
		for _, n := range each {
			sum.Node += n.Node
			sum.Pods += n.Pods
		}
		out[id] = sum
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("socketlb: cannot read traffic: %w", err)
	}
	return out, nil
}

// namesTable returns the table of the Services' names. It deletes the counters of Services that are gone.
func (b *Backend) namesTable() *driver.Table[serviceID, tracker.Key] {
	return &driver.Table[serviceID, tracker.Key]{
		Installed: func(*ruleset.Delta) (iter.Seq2[serviceID, tracker.Key], error) {
			counted, err := readConnections(b.maps[connectionsFile])
			return func(yield func(serviceID, tracker.Key) bool) {
				for id := range counted {
					if !yield(id, tracker.Key{}) {
						return
					}
				}
			}, err
		},
		Put:   func(serviceID, tracker.Key) error { return nil }, // the programs add the counters
		Equal: func(a, b tracker.Key) bool { return a == b },
		Delete: func(id serviceID) error {
			if err := b.maps[connectionsFile].Delete(id); !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
			return nil
		},
	}
}
