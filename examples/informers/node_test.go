package informers

import (
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

func TestHookReceivesTheNodeAndItsDeletion(t *testing.T) {
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here", Zone: "z1"}}))(t)
	var seen []*v1.Node
	c := Config{Tracker: tr, Node: "here", OnNode: func(_ string, n *v1.Node) { seen = append(seen, n) }}
	here := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}}
	c.passNode("here", here)
	c.passNode("here", nil)
	if got := tr.Node(); !got.Equal(tracker.NodeInfo{Name: "here"}) {
		t.Errorf("after the Node was deleted: %+v", got)
	}
	if want := []*v1.Node{here, nil}; !slices.Equal(seen, want) {
		t.Errorf("the hook got %v, want the Node and nil", seen)
	}
}

// TestProgramAddsAddressesOfTheNode has a program that knows addresses that no Node object has.
func TestProgramAddsAddressesOfTheNode(t *testing.T) {
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}))(t)
	own := []netip.Addr{netip.MustParseAddr("192.0.2.9")}
	c := Config{Tracker: tr, Node: "here", NodeInfo: func(n *v1.Node) tracker.NodeInfo {
		info := tracker.NodeInfo{Name: "here"}
		if n != nil {
			info = tracker.NodeInfoOf(n)
		}
		info.Addresses = own
		return info
	}}
	c.passNode("here", &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here", Labels: map[string]string{v1.LabelTopologyZone: "z"}}})
	if got, want := tr.Node(), (tracker.NodeInfo{Name: "here", Zone: "z", Addresses: own}); !got.Equal(want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	c.passNode("here", nil)
	if got, want := tr.Node(), (tracker.NodeInfo{Name: "here", Addresses: own}); !got.Equal(want) {
		t.Errorf("after the Node was deleted: %+v, want %+v", got, want)
	}
}
