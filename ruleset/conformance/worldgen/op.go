package worldgen

import (
	"encoding/json"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// Op is one change: exactly one of its fields is set.
type Op struct {
	SetService    *v1.Service              `json:"setService,omitempty"`
	SetSlice      *discovery.EndpointSlice `json:"setSlice,omitempty"`
	DeleteService *types.NamespacedName    `json:"deleteService,omitempty"`
	DeleteSlice   *types.NamespacedName    `json:"deleteSlice,omitempty"`
	SetNode       *tracker.NodeInfo        `json:"setNode,omitempty"`
}

// Apply makes the change.
func (o Op) Apply(t *tracker.Tracker) {
	switch {
	case o.SetService != nil:
		t.SetService(o.SetService)
	case o.SetSlice != nil:
		t.SetSlice(o.SetSlice)
	case o.DeleteService != nil:
		t.DeleteService(*o.DeleteService)
	case o.DeleteSlice != nil:
		t.DeleteSlice(*o.DeleteSlice)
	case o.SetNode != nil:
		t.SetNode(*o.SetNode)
	}
}

// String shows the change to a reader, as JSON on one line.
func (o Op) String() string {
	b, err := json.Marshal(o)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(string(b), `"metadata":`, `"meta":`)
}

// Steps is a world: what is changed together, step after step.
type Steps [][]Op

// String shows all of it, a line an Op.
func (s Steps) String() string {
	var b strings.Builder
	for i, step := range s {
		fmt.Fprintf(&b, "step %d\n", i)
		for _, o := range step {
			fmt.Fprintf(&b, "  %s\n", o)
		}
	}
	return b.String()
}

// Apply makes all changes of all steps up to the n-th, from 0.
func (s Steps) Apply(t *tracker.Tracker, n int) {
	for _, step := range s[:n+1] {
		for _, o := range step {
			o.Apply(t)
		}
	}
}

// Ops returns how many changes there are.
func (s Steps) Ops() int {
	n := 0
	for _, step := range s {
		n += len(step)
	}
	return n
}

// Without returns the steps without some of the changes: those from the i-th up
// to the j-th, counted through all steps. Steps that become empty stay, so that
// what comes after still comes after.
func (s Steps) Without(i, j int) Steps {
	out := make(Steps, len(s))
	n := 0
	for k, step := range s {
		for _, o := range step {
			if n < i || n >= j {
				out[k] = append(out[k], o)
			}
			n++
		}
	}
	return out
}

// Minimise returns the fewest changes it can find for which fails still reports
// true, by leaving out ever smaller parts. It gives up early when stop does.
func Minimise(s Steps, fails func(Steps) bool, stop func() bool) Steps {
	for size := s.Ops() / 2; size > 0; size /= 2 {
		for i := 0; i < s.Ops(); {
			if stop() {
				return s
			}
			if less := s.Without(i, i+size); fails(less) {
				s = less
			} else {
				i += size
			}
		}
	}
	// A step of its own for nothing is only noise.
	for i := 0; i < len(s); {
		if len(s[i]) != 0 || stop() {
			i++
			continue
		}
		less := append(append(Steps{}, s[:i]...), s[i+1:]...)
		if len(less) == 0 || !fails(less) {
			i++
			continue
		}
		s = less
	}
	return s
}
