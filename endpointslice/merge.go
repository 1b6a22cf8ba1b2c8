package endpointslice

import (
	"net/netip"
	"slices"
)

// merged returns the endpoints of all slices of a Service and whether they differ from those at the last Take. It
// reuses unchanged endpoints and lists.
func (c *Cache[E]) merged(svc *service[E]) (ports []Port[E], changed bool) {
	if svc.edit != nil {
		if ports, changed, ok := c.mergedChange(svc); ok {
			return ports, changed
		}
	}
	if len(svc.slices) == 1 {
		ports = svc.slices[0].ports
	} else {
		ports = c.mergeSlices(svc.slices)
	}
	return c.reuse(ports, svc.taken)
}

// mergeSlices returns the merged ports of several slices. The list of a port that
// only one slice has is shared with that slice.
func (c *Cache[E]) mergeSlices(from []*slice[E]) []Port[E] {
	all := c.lists
	for _, s := range from {
		for i := range s.ports {
			all = append(all, &s.ports[i])
		}
	}
	c.lists = all
	// A stable sort keeps equal ports in the order of their slices' names.
	slices.SortStableFunc(all, (*Port[E]).compare)
	var out []Port[E]
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].compare(all[0]) == 0 {
			n++
		}
		port := *all[0]
		if n > 1 {
			port.Endpoints = c.mergeLists(all[:n])
		}
		out = append(out, port)
		all = all[n:]
	}
	c.lists = tidied(c.lists)
	return out
}

// mergeLists merges the sorted lists of one port, which are in the order of their
// slices' names. Of endpoints with the same address it keeps the one with the highest
// rank, or else the first.
func (c *Cache[E]) mergeLists(ports []*Port[E]) []*E {
	if len(ports) == 1 {
		return ports[0].Endpoints
	}
	half := len(ports) / 2
	a, b := c.mergeLists(ports[:half]), c.mergeLists(ports[half:])
	out := make([]*E, 0, len(a)+len(b))
	for len(a) > 0 && len(b) > 0 {
		x, xRank := c.config.Key(a[0])
		y, yRank := c.config.Key(b[0])
		switch d := x.Compare(y); {
		case d < 0:
			out, a = append(out, a[0]), a[1:]
		case d > 0:
			out, b = append(out, b[0]), b[1:]
		case xRank >= yRank:
			out, a, b = append(out, a[0]), a[1:], b[1:]
		default:
			out, a, b = append(out, b[0]), a[1:], b[1:]
		}
	}
	return append(append(out, a...), b...)
}

// reuse replaces endpoints and lists in ports by equal ones in taken, so that an endpoint that moved to another slice
// keeps its pointer.
func (c *Cache[E]) reuse(ports, taken []Port[E]) (out []Port[E], changed bool) {
	changed = len(ports) != len(taken)
	cloned := false // ports may belong to a slice
	j := 0
	for i := range ports {
		p := &ports[i]
		for j < len(taken) && taken[j].compare(p) < 0 {
			j++
		}
		if j == len(taken) || taken[j].compare(p) != 0 {
			changed = true
			continue
		}
		list := c.reuseList(p.Endpoints, taken[j].Endpoints)
		if &list[0] != &taken[j].Endpoints[0] {
			changed = true
		}
		if &list[0] != &p.Endpoints[0] {
			if !cloned {
				ports, cloned = slices.Clone(ports), true
			}
			ports[i].Endpoints = list
		}
	}
	if !changed {
		return taken, false
	}
	return ports, true
}

// reuseList returns taken if list equals it. Otherwise it returns list, or a copy that shares equal endpoints with
// taken.
func (c *Cache[E]) reuseList(list, taken []*E) []*E {
	if len(list) == len(taken) && &list[0] == &taken[0] {
		return taken
	}
	same := len(list) == len(taken)
	out := list
	j := 0
	for i, e := range list {
		if i < len(taken) && taken[i] == e {
			// Most endpoints are identical: skip the comparison.
			continue
		}
		addr, _ := c.config.Key(e)
		var was *E
		for ; j < len(taken); j++ {
			a, _ := c.config.Key(taken[j])
			if d := a.Compare(addr); d > 0 {
				break
			} else if d == 0 {
				was = taken[j]
				j++
				break
			}
		}
		if was == nil || was != e && !c.config.Equal(was, e) {
			same = false
			continue
		}
		if was != e {
			if &out[0] == &list[0] {
				out = slices.Clone(list)
			}
			out[i] = was
		}
	}
	if same {
		return taken
	}
	return out
}

// edit records that exactly one of a Service's slices changed since the last Take.
type edit[E any] struct {
	slice *slice[E]
	was   []Port[E] // the slice's ports at the last Take
}

// mergedChange returns the result of merged, computed from the last Take and the edit in time proportional to the one
// slice. ok is false if that is not possible: the slice's set of ports changed, or several slices have the same
// address.
func (c *Cache[E]) mergedChange(svc *service[E]) (ports []Port[E], changed, ok bool) {
	was, now := svc.edit.was, svc.edit.slice.ports
	same := func(a, b Port[E]) bool { return a.compare(&b) == 0 }
	if !slices.EqualFunc(was, now, same) {
		return nil, false, false
	}
	ports = svc.taken
	for i := range now {
		j, found := findPort(svc.taken, &now[i])
		if !found || svc.count(&now[i])-len(now[i].Endpoints)+len(was[i].Endpoints) != len(svc.taken[j].Endpoints) {
			return nil, false, false
		}
		list, listChanged, ok := c.mergeChange(svc.taken[j].Endpoints, was[i].Endpoints, now[i].Endpoints)
		if !ok {
			return nil, false, false
		}
		if !listChanged {
			continue
		}
		if !changed {
			ports, changed = slices.Clone(ports), true
		}
		ports[j].Endpoints = list
	}
	return ports, changed, true
}

// count returns the number of endpoints for the port in the Service's slices, with repetitions.
func (svc *service[E]) count(p *Port[E]) (n int) {
	for _, s := range svc.slices {
		if i, ok := findPort(s.ports, p); ok {
			n += len(s.ports[i].Endpoints)
		}
	}
	return n
}

func findPort[E any](ports []Port[E], p *Port[E]) (int, bool) {
	return slices.BinarySearchFunc(ports, p, func(a Port[E], b *Port[E]) int { return a.compare(b) })
}

// mergeChange returns taken with the endpoints in was replaced by those in now. taken
// must contain every address of was. ok is false if the result would contain an
// address twice.
func (c *Cache[E]) mergeChange(taken, was, now []*E) (out []*E, changed, ok bool) {
	out = make([]*E, 0, len(taken)-len(was)+len(now))
	rest := taken
	for len(was) > 0 || len(now) > 0 {
		// Most endpoints are in both was and now.
		if len(was) > 0 && len(now) > 0 && was[0] == now[0] {
			was, now = was[1:], now[1:]
			continue
		}
		d := -1 // compares the addresses of was[0] and now[0]
		var addr netip.AddrPort
		if len(was) > 0 {
			addr, _ = c.config.Key(was[0])
		} else {
			d = 1
		}
		if len(now) > 0 {
			a, _ := c.config.Key(now[0])
			if len(was) > 0 {
				d = addr.Compare(a)
			}
			if d > 0 {
				addr = a
			}
		}
		i, found := slices.BinarySearchFunc(rest, addr, func(e *E, addr netip.AddrPort) int {
			a, _ := c.config.Key(e)
			return a.Compare(addr)
		})
		if found != (d <= 0) {
			return nil, false, false
		}
		out, rest = append(out, rest[:i]...), rest[i:]
		switch {
		case d < 0:
			was, rest, changed = was[1:], rest[1:], true
		case d > 0:
			out, now, changed = append(out, now[0]), now[1:], true
		case c.config.Equal(rest[0], now[0]):
			out, was, now, rest = append(out, rest[0]), was[1:], now[1:], rest[1:]
		default:
			out, was, now, rest, changed = append(out, now[0]), was[1:], now[1:], rest[1:], true
		}
	}
	return append(out, rest...), changed, true
}
