package ruleset

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// admission divides the elements of a Budget.
type admission struct {
	// namespaces holds the namespaces with ports. wanted is the sum of what they may get
	// if only Budget.Namespace bounds them.
	namespaces map[string]*account
	wanted     int
	// level bounds each namespace, math.MaxInt for no bound.
	level int
	// changed holds the accounts whose ports changed since the last division.
	changed []*account
	// refused holds, by ID, the ports for which no elements are left, nil until they are compiled.
	refused map[uint32]*Port
}

// account counts the elements that the ports of a namespace want.
type account struct {
	name   string
	wanted int
	ports  int
	// byAge holds the IDs of the ports, the oldest first, if the namespace once wanted more than
	// it gets, and nil before.
	byAge []uint32
	// refused is the number of ports in admission.refused.
	refused int
	changed bool
}

func (b *Budget) bounded() bool { return b.Namespace != 0 || b.Total != 0 }

// want records how many elements a port needs, 0 if it is removed.
func (e *Engine) want(id uint32, port *tracker.ServicePort, n int) {
	if !e.budget.bounded() {
		return
	}
	s := &e.slots[id]
	was := int(s.want)
	ad := &e.admission
	a := ad.namespaces[port.Key.Namespace]
	if was == n {
		return
	}
	if a == nil {
		a = &account{name: port.Key.Namespace}
		ad.namespaces[a.name] = a
	}
	s.want = int32(n)
	ad.wanted -= e.atMost(a)
	a.wanted += n - was
	ad.wanted += e.atMost(a)
	switch {
	case was == 0:
		a.ports++
		if a.byAge != nil {
			a.byAge = slices.Insert(a.byAge, e.findByAge(a, id, port), id)
		}
	case n == 0:
		a.ports--
		if a.byAge != nil {
			i := e.findByAge(a, id, port)
			a.byAge = slices.Delete(a.byAge, i, i+1)
		}
		if _, ok := ad.refused[id]; ok {
			delete(ad.refused, id)
			a.refused--
		}
		if a.ports == 0 {
			delete(ad.namespaces, a.name)
		}
	}
	ad.examine(a)
}

// atMost returns how many elements a namespace may get without the bound Total.
func (e *Engine) atMost(a *account) int {
	if most := e.budget.Namespace; most != 0 {
		return min(a.wanted, most)
	}
	return a.wanted
}

func (e *Engine) findByAge(a *account, id uint32, port *tracker.ServicePort) int {
	i, _ := slices.BinarySearchFunc(a.byAge, port, func(o uint32, port *tracker.ServicePort) int {
		if o == id {
			return 0
		}
		return compareAge(e.slots[o].port, port)
	})
	return i
}

func compareAge(a, b *tracker.ServicePort) int {
	return cmp.Or(a.CompareAge(b), a.Key.Compare(b.Key))
}

// reaged records that the age of a Service changed.
func (e *Engine) reaged(k tracker.Key) {
	if a := e.admission.namespaces[k.Namespace]; a != nil {
		a.byAge = nil
		e.admission.examine(a)
	}
}

func (ad *admission) examine(a *account) {
	if !a.changed {
		a.changed = true
		ad.changed = append(ad.changed, a)
	}
}

// distribute gives elements to the namespaces and ports whose needs changed. It queues the ports that become admitted
// or refused.
func (e *Engine) distribute() {
	ad := &e.admission
	if len(ad.changed) == 0 {
		return
	}
	if level := e.level(); level != ad.level {
		for _, a := range ad.namespaces {
			if a.refused != 0 || a.wanted > level {
				ad.examine(a)
			}
		}
		ad.level = level
	}
	for _, a := range ad.changed {
		a.changed = false
		e.share(a)
	}
	clear(ad.changed)
	ad.changed = ad.changed[:0]
}

// level returns the number of elements that bounds each namespace.
func (e *Engine) level() int {
	most := cmp.Or(e.budget.Namespace, math.MaxInt)
	left := e.budget.Total
	if left == 0 || e.admission.wanted <= left {
		return most
	}
	wants := make([]int, 0, len(e.admission.namespaces))
	for _, a := range e.admission.namespaces {
		wants = append(wants, e.atMost(a))
	}
	slices.Sort(wants)
	for i, n := range wants {
		if each := left / (len(wants) - i); n > each {
			return each
		}
		left -= n
	}
	return most
}

// share gives the elements of a namespace to the ports that fit, the oldest first.
func (e *Engine) share(a *account) {
	left := e.admission.level
	if a.wanted <= left && a.refused == 0 {
		return
	}
	if a.byAge == nil {
		for id := range e.slots {
			if s := &e.slots[id]; s.want != 0 && s.port.Key.Namespace == a.name {
				a.byAge = append(a.byAge, uint32(id))
			}
		}
		slices.SortFunc(a.byAge, func(x, y uint32) int { return compareAge(e.slots[x].port, e.slots[y].port) })
	}
	for _, id := range a.byAge {
		n := int(e.slots[id].want)
		_, refused := e.admission.refused[id]
		fits := n <= left
		if fits {
			left -= n
		}
		if fits != refused {
			continue
		}
		e.recompile(id)
		if fits {
			delete(e.admission.refused, id)
			a.refused--
		} else {
			e.admission.refused[id] = nil
			a.refused++
		}
	}
}

// admitted returns the Service, or nil if no elements are left for it. It reports what is left out.
func (e *Engine) admitted(now *Port) *Port {
	_, refused := e.admission.refused[now.ID]
	if refused {
		c := *now
		c.LeftOut = &LeftOut{
			Text:      fmt.Sprintf("its namespace has no room for it beside older Services: it costs %d elements; left out: all rules", e.budget.cost(now)),
			Endpoints: max(len(now.Selection.Cluster), len(now.Selection.Local)),
		}
		now = &c
		e.admission.refused[now.ID] = now
	}
	if now.LeftOut != nil {
		e.overBudget(now.Key, now.LeftOut.Text)
	}
	if refused {
		return nil
	}
	return now
}

func (e *Engine) overBudget(k tracker.Key, what string) {
	if e.complaints.Write(slog.LevelWarn, complaint.Port(k.Namespace, k.Name, k.String()), "service exceeds its budget", "reason", string(tracker.ReasonLimitExceeded), "excess", what) {
		e.tracker.Event(k.NamespacedName, true, tracker.ReasonLimitExceeded,
			fmt.Sprintf("port %q (%s): %s", complaint.Value(k.Port), k.Family, complaint.Text(what)))
	}
	if e.onOverBudget != nil {
		e.onOverBudget(k)
	}
}

func (e *Engine) callNotify() {
	e.mu.Lock()
	notify := slices.Clone(e.notify)
	e.mu.Unlock()
	for _, f := range notify {
		(*f)()
	}
}

// serves reports whether a Service has a frontend. A Service that owns one may have to leave it
// out because of the Budget.
func (e *Engine) serves(id uint32, at l4Key) bool {
	s := e.desired(id)
	if s == nil {
		return false
	}
	return slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return l4KeyOf(s, &f) == at })
}
