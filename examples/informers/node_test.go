package informers

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// TestOtherNodesAreIgnored imitates a server that ignores field selectors.
func TestOtherNodesAreIgnored(t *testing.T) {
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here", Zone: "z1"}})
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Tracker: tr, Node: "here"}
	if c.setNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "there"}}) || c.deleteNode(types.NamespacedName{Name: "there"}) {
		t.Errorf("another Node changed this one to %+v", tr.Node())
	}
	if !c.deleteNode(types.NamespacedName{Name: "here"}) || !tr.Node().Equal(tracker.NodeInfo{Name: "here"}) {
		t.Errorf("after the Node was deleted: %+v", tr.Node())
	}
}
