package takeover

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestMarkersWithManyOpenFiles makes and deletes markers in a process with more than 1,024
// open files, such as the listeners of health-check node ports.
func TestMarkersWithManyOpenFiles(t *testing.T) {
	netlab.Require(t)
	netlab.ManyFiles(t)
	node := netlab.NewHost(t)
	marked := func() []tracker.Family {
		t.Helper()
		k := Kernel{NetNS: node.File()}
		defer k.close()
		out, err := k.markers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if err := node.Do(func() error { return Mark([]tracker.Family{tracker.IPv4, tracker.IPv6}) }); err != nil {
		t.Fatal(err)
	}
	if got := marked(); len(got) != 2 {
		t.Errorf("markers %v after Mark", got)
	}
	if err := node.Do(func() error { return Unmark(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	if got := marked(); len(got) != 0 {
		t.Errorf("markers %v after Unmark", got)
	}
}
