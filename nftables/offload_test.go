//go:build linux

package nftables

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

var everyInterface = []string{"*"}

// TestOffloadIsNamedWhereMissing probes offload on the running kernel.
func TestOffloadIsNamedWhereMissing(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	c := Config{NetNS: h.File()}
	if err := Probe(t.Context(), c); err != nil {
		t.Fatalf("without offload: %v", err)
	}
	c.Offload = &Offload{Interfaces: everyInterface}
	err := Probe(t.Context(), c)
	if err == nil {
		t.Skip("this kernel has flowtables")
	}
	var missing *dataplane.UnsupportedError
	if !errors.As(err, &missing) || !strings.Contains(missing.Feature, "CONFIG_NF_FLOW_TABLE_INET") || missing.Minimum != minimumKernel {
		t.Errorf("Probe returned %v", err)
	}
}

func TestOffloadConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		offload Offload
		want    string
	}{
		{Offload{}, "Offload.Interfaces is empty"},
		{Offload{Interfaces: everyInterface, AfterPackets: -1}, "Offload.AfterPackets is negative: -1"},
	} {
		_, err := New(t.Context(), Config{Offload: &c.offload})
		if !errors.Is(err, ruleset.ErrConfig) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("New(%+v) returned %v, want %q", c.offload, err, c.want)
		}
	}
	given := Offload{Interfaces: everyInterface}
	c, err := Config{Offload: &given}.withDefaults()
	if err != nil || c.Offload.AfterPackets != defaultOffloadPackets || given.AfterPackets != 0 {
		t.Errorf("defaults are %+v, %v; the caller's value is %+v", c.Offload, err, given)
	}
}

func TestInterfacesAreChosenByPatterns(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"veth[", ""} {
		if _, err := (&Offload{Interfaces: []string{"eth0", bad}}).withDefaults(); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("pattern %q: %v", bad, err)
		}
	}
	given := []string{"eth0", "veth*"}
	o, err := (&Offload{Interfaces: given}).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	given[0] = "*"
	for name, want := range map[string]bool{"eth0": true, "veth": true, "veth12": true, "eth01": false, "cni0": false, "": false} {
		if o.chooses(name) != want {
			t.Errorf("%q: %v", name, !want)
		}
	}
	if o := (&Offload{Interfaces: everyInterface}); o.chooses("lo") || !o.chooses("eth0") {
		t.Error("the loopback interface is chosen, or another one is not")
	}
}
