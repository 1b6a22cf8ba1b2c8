package balance

import (
	"errors"
	"fmt"
	"strings"
)

// Algorithm identifies a type of [Balancer] by name, for flags and annotations. The zero
// value is weighted-round-robin.
type Algorithm uint8

// The algorithms.
const (
	// WeightedRoundRobinAlgorithm is [WeightedRoundRobin].
	WeightedRoundRobinAlgorithm Algorithm = iota
	// RoundRobinAlgorithm is [RoundRobin].
	RoundRobinAlgorithm
	// LeastConnectionsAlgorithm is [LeastConnections].
	LeastConnectionsAlgorithm
	// TwoChoicesAlgorithm is [TwoChoices].
	TwoChoicesAlgorithm
	// SourceHashAlgorithm is [SourceHash] with a Seed of 0.
	SourceHashAlgorithm
)

var names = [...]string{"weighted-round-robin", "round-robin", "least-connections", "two-choices", "source-hash"}

// ErrUnknown is wrapped by all errors of [Parse].
var ErrUnknown = errors.New("balance: unknown algorithm")

// Names returns the names that [Parse] accepts.
func Names() []string { return append([]string(nil), names[:]...) }

// Parse returns the algorithm with a name. Its error wraps [ErrUnknown] and lists the known
// names.
func Parse(name string) (Algorithm, error) {
	for i, n := range names {
		if n == name {
			return Algorithm(i), nil
		}
	}
	return 0, fmt.Errorf("%w %q, want one of %s", ErrUnknown, name, strings.Join(names[:], ", "))
}

// String returns the name that [Parse] accepts.
func (a Algorithm) String() string {
	if int(a) < len(names) {
		return names[a]
	}
	return "unknown"
}

// New returns a new Balancer. LeastConnections and TwoChoices use load; for the others it may
// be nil. An unknown value counts as 0.
func (a Algorithm) New(load Load) Balancer {
	switch a {
	case RoundRobinAlgorithm:
		return &RoundRobin{}
	case LeastConnectionsAlgorithm:
		return &LeastConnections{load}
	case TwoChoicesAlgorithm:
		return &TwoChoices{load}
	case SourceHashAlgorithm:
		return &SourceHash{}
	}
	return &WeightedRoundRobin{}
}
