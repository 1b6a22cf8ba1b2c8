package ruleset

import (
	"container/heap"

	"github.com/go-proxier/proxier/tracker"
)

// account counts the elements of live slots: of all, or of those of one namespace.
type account struct {
	// name names the Services in messages.
	name string
	// limit is the maximum of used. A port that had rules may exceed it: see [Budget].
	limit, used int
	waiting     queue
	// freed is set if the account is in Engine.freed.
	freed bool
}

// left returns the number of elements that may be added. It is negative if used exceeds limit.
func (a *account) left() int { return a.limit - a.used }

// waiter is a port that has fewer elements than it could use, because an account has no more.
type waiter struct {
	id       uint32
	state    tracker.PortState
	account  *account
	hasRules bool
	index    int // in account.waiting
}

// queue is a heap of waiters: first those without rules, then by the age of the Services.
type queue []*waiter

// Len implements [heap.Interface].
func (q queue) Len() int { return len(q) }

// Less implements [heap.Interface].
func (q queue) Less(i, j int) bool {
	if a, b := q[i], q[j]; a.hasRules == b.hasRules {
		return compareAge(a.state.Port, b.state.Port) < 0
	}
	return q[j].hasRules
}

// Swap implements [heap.Interface].
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements [heap.Interface].
func (q *queue) Push(w any) {
	w.(*waiter).index = len(*q)
	*q = append(*q, w.(*waiter))
}

// Pop implements [heap.Interface].
func (q *queue) Pop() any {
	last := len(*q) - 1
	w := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return w
}

// wait lets admit compile a port again when its account has more elements left.
func (e *Engine) wait(w *waiter) {
	e.waiting[w.id] = w
	heap.Push(&w.account.waiting, w)
}

// stopWaiting undoes wait.
func (e *Engine) stopWaiting(id uint32) {
	if w := e.waiting[id]; w != nil {
		delete(e.waiting, id)
		heap.Remove(&w.account.waiting, w.index)
		e.noteFreed(w.account) // others waited behind it
	}
}

// noteFreed lets admit examine an account.
func (e *Engine) noteFreed(a *account) {
	if !a.freed && len(a.waiting) != 0 {
		a.freed = true
		e.freed = append(e.freed, a)
	}
}

// namespace returns the account of a namespace.
func (e *Engine) namespace(name string) *account {
	a := e.namespaces[name]
	if a == nil {
		a = &account{name: "the namespace", limit: e.budget.Namespace}
		e.namespaces[name] = a
	}
	return a
}

// narrowest returns the account that has the fewest elements left for a namespace, nil without a
// bound.
func (e *Engine) narrowest(namespace string) (out *account) {
	if e.budget.Total != 0 {
		out = &e.total
	}
	if e.budget.Namespace != 0 {
		if a := e.namespace(namespace); out == nil || a.left() <= out.left() {
			out = a
		}
	}
	return out
}
