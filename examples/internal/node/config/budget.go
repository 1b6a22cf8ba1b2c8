package config

import (
	"fmt"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

// budgetHelp describes the bounds and their defaults.
func budgetHelp() string {
	d := ruleset.DefaultBudget()
	return fmt.Sprintf("port: endpoints of a port of a Service in one address family (default %d); "+
		"namespace: elements of all Services of a namespace, a quarter of total if only that is given (default %d); "+
		"total: elements of all Services (default %d); delta: elements of one change of the rules (default %d)",
		d.Port, d.Namespace, d.Total, d.Delta)
}

// budget returns the default budget with the given bounds.
func budget(given map[string]int) (ruleset.Budget, error) {
	out := ruleset.DefaultBudget()
	bounds := map[string]*int{"port": &out.Port, "namespace": &out.Namespace, "total": &out.Total, "delta": &out.Delta}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		switch bound := bounds[name]; {
		case bound == nil:
			return out, fmt.Errorf("no bound %q", name)
		case given[name] < 0:
			return out, fmt.Errorf("%s is negative: %d", name, given[name])
		default:
			*bound = given[name]
		}
	}
	if _, ok := given["namespace"]; !ok {
		out.Namespace = (out.Total + 3) / 4 // not 0, which means none
	}
	return out, nil
}
