package main

import (
	"bytes"
	"errors"
	"maps"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestDemoNeedsRootForSocketLB runs in the user namespace of the tests, where the kernel does
// not load programs.
func TestDemoNeedsRootForSocketLB(t *testing.T) {
	netlab.Require(t)
	dir, closeDir, err := socketlb.TemporaryDir()
	if err == nil {
		err = errors.Join(socketlb.Probe(t.Context(), socketlb.Config{Dir: dir}), closeDir())
	}
	if err == nil {
		t.Skip("programs can be loaded here")
	}
	var out, diag bytes.Buffer
	if status := demo(t.Context(), []string{"--socket-lb"}, &out, &diag); status != exitNoSpaces {
		t.Errorf("status %d", status)
	}
	if !strings.Contains(diag.String(), "CAP_BPF") || !strings.Contains(diag.String(), "needs root") {
		t.Errorf("standard error:\n%s", diag.String())
	}
}

// TestTrafficOfSocketsIsAdded adds connections that were translated at the socket to those of
// the rules.
func TestTrafficOfSocketsIsAdded(t *testing.T) {
	key := func(name string) tracker.Key {
		return tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}}, Family: tracker.IPv4}
	}
	rules := &ruleset.Traffic{Services: map[tracker.Key]ruleset.Counters{key("a"): {Connections: 2, Refused: 1}, key("b"): {Connections: 4}}}
	addTraffic(rules, &ruleset.Traffic{Services: map[tracker.Key]ruleset.Counters{key("a"): {Connections: 8}, key("c"): {Connections: 16}}})
	want := map[tracker.Key]ruleset.Counters{key("a"): {Connections: 10, Refused: 1}, key("b"): {Connections: 4}, key("c"): {Connections: 16}}
	if !maps.Equal(rules.Services, want) {
		t.Errorf("%v, want %v", rules.Services, want)
	}
}
