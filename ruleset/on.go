package ruleset

import (
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// On returns the Service as another node has it: with the same ID, the same frontends and
// the pools that node n may use. The frontends stay those that the [Engine] assigned, which
// [Compile] alone does not know. A process that computes the rules of several nodes calls
// it; see package placement. Nil stays nil.
func (s *Service) On(n *Node, o tracker.TopologyOptions) *Service {
	if s == nil {
		return nil
	}
	out := Compile(tracker.PortState{Port: s.Port, Endpoints: s.Endpoints}, n, o)
	out.ID = s.ID
	out.Frontends = slices.DeleteFunc(out.Frontends, func(f Frontend) bool {
		return !slices.ContainsFunc(s.Frontends, func(o Frontend) bool { return o.Addr == f.Addr && o.Port == f.Port })
	})
	return out
}

// On returns the change of the Service's rules on another node: Old, New and Attempted as
// [Service.On] returns them, and the Fields in which they differ there. After a failed
// attempt, Fields stays FieldAll.
func (c Change) On(n *Node, o tracker.TopologyOptions) Change {
	out := c
	out.Old, out.New = c.Old.On(n, o), c.New.On(n, o)
	out.Attempted = make([]*Service, len(c.Attempted))
	for i, s := range c.Attempted {
		out.Attempted[i] = s.On(n, o)
	}
	if c.Fields != FieldAll {
		out.Fields = diff(out.Old, out.New)
	}
	return out
}
