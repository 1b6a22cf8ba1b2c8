package modes

import (
	"maps"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestLimitsLeaveFilesForTheAgent checks the limits of a process with few and with many files.
func TestLimitsLeaveFilesForTheAgent(t *testing.T) {
	for files, agent := range map[uint64]int{64: 32, 256: 96, 1024: 128, 65536: 128, 1 << 30: 128} {
		l := LimitsFor(files)
		all := l.Sockets + 6*l.Connections + l.Sessions + 3*l.Requests
		if l.Sockets < 1 || l.Connections < 1 || l.Sessions < 1 || l.Requests < 2 || all+agent > int(files) {
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

func TestPreserveDestinationIsReadOnWindows(t *testing.T) {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{winkernel.PreserveDestination: "true"}}}
	var p tracker.ServicePort
	if Kernelspace(&config.Config{}).OnService(s, &p); !p.NeedLocalSet {
		t.Error("the annotation has no effect")
	}
}
