package balance

import (
	"errors"
	"fmt"
	"testing"
)

func TestParseAcceptsEveryName(t *testing.T) {
	want := map[string]string{
		"weighted-round-robin": "*balance.WeightedRoundRobin",
		"round-robin":          "*balance.RoundRobin",
		"least-connections":    "*balance.LeastConnections",
		"two-choices":          "*balance.TwoChoices",
		"source-hash":          "*balance.SourceHash",
	}
	if len(Names()) != len(want) {
		t.Errorf("names %v", Names())
	}
	for n, kind := range want {
		a, err := Parse(n)
		if err != nil || a.String() != n || fmt.Sprintf("%T", a.New(idle)) != kind {
			t.Errorf("%s: %s, %T, %v", n, a, a.New(idle), err)
		}
	}
	if _, err := Parse("Round-Robin"); !errors.Is(err, ErrUnknown) {
		t.Errorf("error %v", err)
	}
	if a := Algorithm(99); a.String() != "unknown" || a.New(nil).Pick(pool(1), client) == nil {
		t.Error("an unknown algorithm does not count as 0")
	}
}
