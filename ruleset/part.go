package ruleset

import (
	"k8s.io/apimachinery/pkg/types"
)

// AttachPart does the same as Attach for a backend that is responsible for the Services for which serves returns
// true, as if there were no others; "Two data planes" in BACKEND.md describes moves and conflicts. [Limits] and
// triggers are those of the part alone. [SyncInfo] counts Services of the whole ruleset. A Cursor that follows this
// one follows its part. A Service that fails in one data plane still takes frontends from Services of another.
//
// The Engine calls serves once for each compiled version of a Service port, and once for each that exists during
// AttachPart, with its lock held. serves must be fast, must not call the Engine or a Cursor, and must not panic. Its
// result may depend on nothing but the [Port], for example on Port.Spec.Ext. Ports and families of one Service may be
// in different parts. If serves is nil, the part is everything.
func (e *Engine) AttachPart(name string, b Backend, serves func(*Port) bool) *Cursor {
	c := e.newCursor(name, b)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cursors = append(e.cursors, c)
	if serves == nil {
		return c
	}
	c.part = serves
	for id := range e.slots {
		c.assign(uint32(id), e.desired(uint32(id)))
	}
	return c
}

// assign updates the parts of all cursors for an ID. now is its live version, or nil.
func (e *Engine) assign(id uint32, now *Port) {
	for _, c := range e.cursors {
		if c.part != nil {
			c.assign(id, now)
		}
	}
}

func (c *Cursor) assign(id uint32, now *Port) {
	c.grow(int(id) + 1)
	c.states[id].in = now != nil && c.part(now)
}

func (c *Cursor) has(id uint32) bool {
	return c.part == nil || int(id) < len(c.states) && c.states[id].in
}

func (c *Cursor) concerns(name types.NamespacedName) bool {
	if c.part == nil {
		return true
	}
	for _, id := range c.engine.names[name] {
		if c.has(id) {
			return true
		}
	}
	return false
}
