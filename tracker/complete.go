package tracker

import (
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/internal/complaint"
)

// completed holds the results of [Config.OnServiceEndpoint] for one port.
type completed struct {
	port *ServicePort
	// in holds the endpoints from the port's slices. made holds the hook's result for
	// each, or nil if the hook rejected the endpoint. out is made without the nils.
	// The three share memory where they are equal.
	in, made, out []*Endpoint
}

// complete runs the hook on the endpoints of an update. It reuses the results for endpoints
// and ports that did not change. The caller holds t.mu and t.services.mu.
func (t *Tracker) complete(u Update) {
	before := t.completed[u.Name]
	after := make([]completed, len(u.Ports))
	var left leftOuts
	for i := range u.Ports {
		s := &u.Ports[i]
		was := completed{port: s.Port}
		if j, ok := findCompleted(before, s.Port.Key); ok {
			was = before[j]
		}
		after[i] = t.completePort(s.Port, s.Endpoints, was, &left)
		s.Endpoints = after[i].out
	}
	if len(after) == 0 {
		delete(t.completed, u.Name)
		return
	}
	t.completed[u.Name] = after
	t.services.builder.reporter.report("", "endpoints of a Service", "service", t.services.reference(u.Name), &left)
}

func findCompleted(list []completed, k Key) (int, bool) {
	return slices.BinarySearchFunc(list, k, func(c completed, k Key) int { return c.port.Key.Compare(k) })
}

// sameList reports whether two lists are one in memory. Lists of different memory may be equal.
func sameList(a, b []*Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// completePort runs the hook on the endpoints in of port p. was is the previous
// result for the port.
func (t *Tracker) completePort(p *ServicePort, in []*Endpoint, was completed, left *leftOuts) completed {
	same := was.port == p
	if same && sameList(in, was.in) {
		return was
	}
	now := completed{port: p, in: in, made: make([]*Endpoint, len(in))}
	k, out := 0, 0
	for i, from := range in {
		// Both lists are sorted by address.
		for k < len(was.in) && was.in[k].Addr.Compare(from.Addr) < 0 {
			k++
		}
		var old *Endpoint
		if k < len(was.in) && was.in[k].Addr == from.Addr {
			old = was.made[k]
			if same && was.in[k] == from {
				if now.made[i] = old; old != nil {
					out++
				}
				continue
			}
		}
		e := *from
		err := t.hook(p, &e)
		e.Addr = from.Addr
		if err != nil {
			reason := hookReason(err)
			left.add(LeftOut{Reason: reason, Port: &p.Key.Port,
				Err: fmt.Errorf("port %q (%s): endpoint %s: %w", complaint.Value(p.Key.Port), p.Key.Family, from.Addr, err)})
			if reason == ReasonHookFailed {
				continue
			}
		}
		out++
		switch {
		case e.Equal(from):
			now.made[i] = from
		case old.Equal(&e):
			now.made[i] = old
		default:
			now.made[i] = &e
		}
	}
	switch {
	case slices.Equal(now.made, in):
		now.made = in
	case slices.Equal(now.made, was.made):
		now.made = was.made
	}
	now.out = now.made
	if out != len(in) {
		now.out = make([]*Endpoint, 0, out)
		for _, e := range now.made {
			if e != nil {
				now.out = append(now.out, e)
			}
		}
	}
	if slices.Equal(now.out, was.out) {
		now.out = was.out
	}
	return now
}
