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
	// SetService and SetSlice hold a new or changed object.
	SetService *v1.Service              `json:"setService,omitempty"`
	SetSlice   *discovery.EndpointSlice `json:"setSlice,omitempty"`
	// DeleteService and DeleteSlice hold the name of a deleted object.
	DeleteService *types.NamespacedName `json:"deleteService,omitempty"`
	DeleteSlice   *types.NamespacedName `json:"deleteSlice,omitempty"`
	// SetNode holds the changed node.
	SetNode *tracker.NodeInfo `json:"setNode,omitempty"`
}

// Apply applies the change to a tracker.
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

// String returns the change as JSON on one line.
func (o Op) String() string {
	b, err := json.Marshal(o)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(string(b), `"metadata":`, `"meta":`)
}

// Steps is a world as a list of steps. Each step is a list of changes to apply
// together.
type Steps [][]Op

// String returns a line for each step and each change.
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

// Apply applies the changes of the steps from 0 to n to a tracker.
func (s Steps) Apply(t *tracker.Tracker, n int) {
	for _, step := range s[:n+1] {
		for _, o := range step {
			o.Apply(t)
		}
	}
}

// Ops returns the number of changes.
func (s Steps) Ops() int {
	n := 0
	for _, step := range s {
		n += len(step)
	}
	return n
}

// Without returns the steps without the changes from i to j-1, counted from 0 through
// all steps. Steps that become empty stay.
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

// Minimize removes changes while fails still reports true for the rest, in smaller
// and smaller groups, and returns the rest. When stop reports true, it returns its
// current result.
func Minimize(s Steps, fails func(Steps) bool, stop func() bool) Steps {
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
	// Remove empty steps.
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
