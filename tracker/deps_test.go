package tracker_test

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestOnlyAPIModulesAreImported checks that the packages add no modules to those that
// the API types need.
func TestOnlyAPIModulesAreImported(t *testing.T) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go tool")
	}
	modules := func(packages ...string) map[string]bool {
		args := append([]string{"list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}"}, packages...)
		out, err := exec.Command(goTool, args...).Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		set := map[string]bool{}
		for m := range strings.FieldsSeq(string(out)) {
			set[m] = true
		}
		return set
	}
	const self = "github.com/go-proxier/proxier"
	allowed := modules("k8s.io/api/core/v1", "k8s.io/api/discovery/v1")
	allowed[self] = true
	for _, m := range slices.Sorted(maps.Keys(modules(self+"/tracker", self+"/endpointslice"))) {
		if !allowed[m] {
			t.Errorf("needs %s", m)
		}
	}
}
