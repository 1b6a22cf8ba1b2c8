package modes

import (
	"maps"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestLimitsLeaveFilesForTheAgent checks the limits of a process with few and with many files.
func TestLimitsLeaveFilesForTheAgent(t *testing.T) {
	for _, files := range []uint64{256, 1024, 65536, 1 << 30} {
		l := LimitsFor(files)
		if l.Sockets < 1 || l.Connections < 1 || l.Sessions < 1 || uint64(l.Sockets+6*l.Connections+l.Sessions) > files*9/10 {
			t.Errorf("%d files: %+v", files, l)
		}
	}
}

// TestTrafficOfSocketsIsAdded adds connections that were translated at the socket to those of
// the rules.
func TestTrafficOfSocketsIsAdded(t *testing.T) {
	key := func(name string) tracker.Key {
		return tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}}, Family: tracker.IPv4}
	}
	rules := &dataplane.Traffic{Services: map[tracker.Key]dataplane.Counters{key("a"): {Connections: 2, Refused: 1}, key("b"): {Connections: 4}}}
	AddTraffic(rules, &dataplane.Traffic{Services: map[tracker.Key]dataplane.Counters{key("a"): {Connections: 8}, key("c"): {Connections: 16}}})
	want := map[tracker.Key]dataplane.Counters{key("a"): {Connections: 10, Refused: 1}, key("b"): {Connections: 4}, key("c"): {Connections: 16}}
	if !maps.Equal(rules.Services, want) {
		t.Errorf("%v, want %v", rules.Services, want)
	}
}
