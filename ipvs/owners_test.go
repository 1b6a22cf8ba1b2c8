//go:build linux

package ipvs

import (
	"slices"
	"testing"
)

func TestOwnersAreCounted(t *testing.T) {
	o := owned[string, int]{}
	o.found("found", 7)
	if !o.has("found") || o.has("new") || o["found"].value != 7 {
		t.Errorf("%v", o)
	}
	if o.take("found") {
		t.Error("an object that the kernel holds is reported as new")
	}
	if !o.take("new") || o.take("new") {
		t.Error("only the first owner finds an object new")
	}
	o.set("new", 3)
	if o.drop("new") || o["new"].value != 3 {
		t.Error("an object with an owner left is reported as unused")
	}
	if !o.drop("new") || !o.has("new") {
		t.Error("an object without owners stays until it is deleted")
	}
	if got := slices.Collect(o.unowned); !slices.Equal(got, []string{"new"}) {
		t.Errorf("without owners: %v", got)
	}
}
