package ruleset

import (
	"fmt"
	"slices"
	"strings"
)

// LeftOut is what a [Budget] leaves out of a Service, always with the reason
// [tracker.ReasonLimitExceeded]. It must not be changed.
type LeftOut struct {
	// Text names the bounds and all parts that are left out, for people, such as "it has 30000
	// endpoints, at most 20000 are allowed; left out: 10000 of 30000 endpoints".
	Text string
	// Frontends holds the frontends that are left out.
	Frontends []Frontend
	// Sources is [tracker.ServicePort].SourceRangesLeftOut.
	Sources int
	// Endpoints is the number of endpoints that are missing from the larger pool.
	Endpoints int

	bounds, parts []string
}

func (l *LeftOut) clone() LeftOut {
	if l == nil {
		return LeftOut{}
	}
	out := *l
	out.Frontends, out.bounds, out.parts = slices.Clip(l.Frontends), slices.Clip(l.bounds), slices.Clip(l.parts)
	return out
}

// omissions collects what is left out of a Service.
type omissions struct{ LeftOut }

// bound adds a bound that the Service exceeds.
func (o *omissions) bound(format string, args ...any) {
	o.bounds = append(o.bounds, fmt.Sprintf(format, args...))
}

// note adds a part that is left out.
func (o *omissions) note(format string, args ...any) {
	o.parts = append(o.parts, fmt.Sprintf(format, args...))
}

// result returns what is left out, nil for nothing.
func (o *omissions) result() *LeftOut {
	if len(o.parts) == 0 {
		return nil
	}
	out := o.LeftOut
	out.Text = "left out: " + strings.Join(out.parts, ", ")
	if len(out.bounds) != 0 {
		out.Text = strings.Join(out.bounds, ", and ") + "; " + out.Text
	}
	return &out
}
