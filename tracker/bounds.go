package tracker

import "fmt"

// Bounds of one Service. Its ports, addresses and source ranges are lists, and every port has
// every address, so a small object could have a very large result. The parts that come last in
// the object are left out, and reported with [ReasonLimitExceeded].
const (
	// MaxPorts is the maximum number of ports.
	MaxPorts = 2000
	// MaxAddresses is the maximum number of external IPs, of load-balancer IPs and of source
	// ranges.
	MaxAddresses = 1000
	// MaxFrontends is the maximum number of ports times external and load-balancer IPs.
	MaxFrontends = 10_000
)

// first returns the first most elements of list. It reports the others.
func first[T any](b *builder, what string, list []T, most int) []T {
	if len(list) <= most {
		return list
	}
	b.skip(ReasonLimitExceeded, fmt.Errorf("%d %s are more than %d: the others are not used", len(list), what, most))
	return list[:most]
}
