package conformance

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// The methods of [World] that a script calls: see [cluster].

func (w *World) set(services ...service) {
	for _, s := range services {
		c := s.complete()
		w.services[c.name] = c
		w.Tracker.SetService(c.object(w.Env.Families))
		for _, f := range w.Env.Families {
			w.Tracker.SetSlice(c.slice(f))
		}
	}
}

func (w *World) change(name string, edit func(*service)) {
	s := *w.services[name]
	edit(&s)
	w.set(s)
}

func (w *World) remove(name string) {
	delete(w.services, name)
	w.Tracker.DeleteService(types.NamespacedName{Namespace: namespace, Name: name})
	for _, f := range w.Env.Families {
		w.Tracker.DeleteSlice(types.NamespacedName{Namespace: namespace, Name: sliceName(name, f)})
	}
}

func (w *World) node() tracker.NodeInfo               { return w.Tracker.Node() }
func (w *World) setNode(n tracker.NodeInfo)           { w.Tracker.SetNode(n) }
func (w *World) setServiceCIDRs(cidrs []netip.Prefix) { w.Engine.SetServiceCIDRs(cidrs) }
func (w *World) families() []tracker.Family           { return w.Env.Families }
func (w *World) resync()                              { w.Cursor.Resync() }
func (w *World) detach()                              { w.Cursor.Detach() }

func (w *World) hold(to []Target) func() error { return w.Hold(to).Check }

func (w *World) errorf(format string, args ...any) {
	w.tb.Helper()
	w.tb.Errorf(format, args...)
}
