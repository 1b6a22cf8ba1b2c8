package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
)

type bound struct {
	name, what string
	field      func(*ruleset.Budget) *int
}

func bounds() []bound {
	return []bound{
		{"port", "endpoints of a port of a Service in one address family", func(b *ruleset.Budget) *int { return &b.Port }},
		{"namespace", "elements of all Services of a namespace, a quarter of total if only that is given", func(b *ruleset.Budget) *int { return &b.Namespace }},
		{"total", "elements of all Services", func(b *ruleset.Budget) *int { return &b.Total }},
		{"delta", "elements of one change of the rules", func(b *ruleset.Budget) *int { return &b.Delta }},
	}
}

// budgetHelp describes the bounds and their defaults.
func budgetHelp() string {
	def := ruleset.DefaultBudget()
	var out []string
	for _, b := range bounds() {
		out = append(out, fmt.Sprintf("%s: %s (default %d)", b.name, b.what, *b.field(&def)))
	}
	return strings.Join(out, "; ")
}

// budget returns the default budget with the given bounds.
func budget(given map[string]int) (ruleset.Budget, error) {
	out := ruleset.DefaultBudget()
	list := bounds()
	for _, name := range slices.Sorted(maps.Keys(given)) {
		i := slices.IndexFunc(list, func(b bound) bool { return b.name == name })
		if i < 0 {
			return out, fmt.Errorf("no bound %q", name)
		}
		if given[name] < 0 {
			return out, fmt.Errorf("%s is negative: %d", name, given[name])
		}
		*list[i].field(&out) = given[name]
	}
	if _, ok := given["namespace"]; !ok {
		out.Namespace = (out.Total + 3) / 4 // not 0, which means none
	}
	return out, nil
}
