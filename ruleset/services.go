package ruleset

import (
	"iter"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// ServiceDelta is the change of one Service: of all its ports, in both families.
type ServiceDelta struct {
	// Name is the name of the Service.
	Name types.NamespacedName
	// Changes holds the changes of its ports in the delta, in the order of the delta.
	Changes []Change
	// Ports holds every port as it must be after the delta, including the unchanged ones,
	// sorted by key. It is empty if the Service was removed.
	Ports []*Port
}

// Services yields the changes of d by Service, each with all ports of the Service. The
// order is that of the first Change of each Service. Services may only be called during
// Apply. In a part of a delta, such as the one for a family, the ports whose Change is in
// another part are the ones that the backend last acknowledged.
func (d *Delta) Services() iter.Seq[ServiceDelta] {
	return func(yield func(ServiceDelta) bool) {
		var order []types.NamespacedName
		byName := make(map[types.NamespacedName][]Change)
		for i := range d.Changes {
			n := d.Changes[i].Key.NamespacedName
			if byName[n] == nil {
				order = append(order, n)
			}
			byName[n] = append(byName[n], d.Changes[i])
		}
		for _, n := range order {
			changes := byName[n]
			if !yield(ServiceDelta{Name: n, Changes: changes, Ports: d.ports(changes)}) {
				return
			}
		}
	}
}

// ports returns the ports of a Service after its changes.
func (d *Delta) ports(changes []Change) []*Port {
	ids := changes[0].ports
	out := make([]*Port, 0, max(len(ids), len(changes)))
	changed := make(map[uint32]bool, len(changes))
	for i := range changes {
		changed[changes[i].ID()] = true
		if s := changes[i].New; s != nil {
			out = append(out, s)
		}
	}
	if len(ids) > len(out) && d.cursor != nil {
		d.cursor.engine.mu.Lock()
		for _, id := range ids {
			if s := d.cursor.acked(id); s != nil && !changed[id] {
				out = append(out, s)
			}
		}
		d.cursor.engine.mu.Unlock()
	}
	slices.SortFunc(out, func(a, b *Port) int { return a.Key.Compare(b.Key) })
	return out
}

// PortsOf returns every port of a Service, in both families, sorted by key. It returns nil
// if there are none. The first call builds an index of the Services' names. The result is
// shared and must not be modified.
func (s *Snapshot) PortsOf(name types.NamespacedName) []*Port {
	s.onceNames.Do(func() {
		s.names = make(map[types.NamespacedName][]*Port, len(s.Ports))
		for _, svc := range s.Ports {
			s.names[svc.Key.NamespacedName] = append(s.names[svc.Key.NamespacedName], svc)
		}
		for _, ports := range s.names {
			slices.SortFunc(ports, func(a, b *Port) int { return a.Key.Compare(b.Key) })
		}
	})
	return s.names[name]
}
