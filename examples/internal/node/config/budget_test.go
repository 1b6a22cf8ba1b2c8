package config

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
)

// TestBudgetOfANamespaceIsAQuarterOfTheTotal reads --budget.
func TestBudgetOfANamespaceIsAQuarterOfTheTotal(t *testing.T) {
	def := ruleset.DefaultBudget()
	for _, c := range []struct {
		arg              string
		total, namespace int
	}{
		{"port=7000", def.Total, def.Namespace},
		{"total=1000", 1000, 250},
		{"total=1", 1, 1},
		{"total=0", 0, 0},
		{"namespace=300", def.Total, 300},
		{"total=1000,namespace=400", 1000, 400},
		{"namespace=0", def.Total, 0},
	} {
		fl := NewFlags("run")
		must.Do(t, fl.Parse([]string{"--budget=" + c.arg}))
		b, err := budget(fl.budget)
		if err != nil || b.Total != c.total || b.Namespace != c.namespace {
			t.Errorf("%s: total %d, namespace %d, error %v; want %d and %d", c.arg, b.Total, b.Namespace, err, c.total, c.namespace)
		}
	}
	if def.Namespace != def.Total/4 {
		t.Errorf("the default of a namespace is %d of %d", def.Namespace, def.Total)
	}
	for _, bad := range []map[string]int{{"namespace": -1}, {"namespaces": 1}} {
		if _, err := budget(bad); err == nil {
			t.Errorf("%v is accepted", bad)
		}
	}
}
