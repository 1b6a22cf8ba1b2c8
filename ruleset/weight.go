package ruleset

import "github.com/go-proxier/proxier/tracker"

// Weighted reports whether the endpoints of the pool for a target have different
// weights. It is fast if all endpoints of the Service have the same weight.
func (s *Service) Weighted(t Target) bool {
	return !s.uniform && !uniform(s.Pool(t))
}

// uniform reports whether all endpoints have the same weight.
func uniform(eps []*tracker.Endpoint) bool {
	var first *tracker.Endpoint
	for _, ep := range eps {
		switch {
		case ep == nil:
		case first == nil:
			first = ep
		case ep.Weight != first.Weight:
			return false
		}
	}
	return true
}
