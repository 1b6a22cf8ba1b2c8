package endpointslice

import (
	"net/netip"
	"slices"
)

// edit records that exactly one of a Service's slices changed since the last Take.
type edit[E any] struct {
	slice *slice[E]
	was   []Port[E] // the slice's ports at the last Take
}

// mergedChange returns the result of merged, computed from the last Take and the edit
// in time proportional to the one slice. ok is false if the slice's set of ports
// changed, or if several slices have the same address.
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

// count returns the number of endpoints for the port in the Service's slices. It
// counts an endpoint in two slices twice.
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
