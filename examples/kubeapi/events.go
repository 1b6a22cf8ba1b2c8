package kubeapi

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
)

// Recorder writes Events, as client-go's recorder does: in the background, like
// ones joined, and not too many of them. Its Event is a tracker.EventSink.
type Recorder struct {
	b    record.EventBroadcaster
	r    record.EventRecorder
	node *v1.ObjectReference
}

// NewRecorder returns a Recorder for the agent of a node. Shutdown ends it.
func NewRecorder(c *Client, component, node string) *Recorder {
	b := record.NewBroadcaster()
	b.StartRecordingToSink(sink{c.core})
	return &Recorder{
		b: b,
		// Objects are always named by reference here, so no scheme is needed to tell
		// their kind.
		r: b.NewRecorder(runtime.NewScheme(), v1.EventSource{Component: component, Host: node}),
		// As the kubelet's and kube-proxy's: the UID is the name.
		node: &v1.ObjectReference{Kind: "Node", Name: node, UID: types.UID(node)},
	}
}

// Shutdown writes what it can soon and ends the Recorder.
func (r *Recorder) Shutdown() { r.b.Shutdown() }

// Event writes an Event about an object. It does not block.
func (r *Recorder) Event(ref v1.ObjectReference, warning bool, reason, message string) {
	typ := v1.EventTypeNormal
	if warning {
		typ = v1.EventTypeWarning
	}
	r.r.Event(&ref, typ, reason, message)
}

// NodeEvent writes an Event about the node itself.
func (r *Recorder) NodeEvent(warning bool, reason, message string) {
	r.Event(*r.node, warning, reason, message)
}

// sinkTimeout is how long one Event may take to be written.
const sinkTimeout = 10 * time.Second

// sink writes Events to the API server.
type sink struct{ c rest.Interface }

// Create writes a new Event.
func (s sink) Create(e *v1.Event) (*v1.Event, error) {
	return do(s.c.Post().NamespaceIfScoped(e.Namespace, true).Resource("events").Body(e))
}

// Update replaces an Event.
func (s sink) Update(e *v1.Event) (*v1.Event, error) {
	return do(s.c.Put().NamespaceIfScoped(e.Namespace, true).Resource("events").Name(e.Name).Body(e))
}

// Patch changes an Event.
func (s sink) Patch(e *v1.Event, data []byte) (*v1.Event, error) {
	return do(s.c.Patch(types.StrategicMergePatchType).NamespaceIfScoped(e.Namespace, true).Resource("events").Name(e.Name).Body(data))
}

func do(r *rest.Request) (*v1.Event, error) {
	ctx, cancel := context.WithTimeout(context.Background(), sinkTimeout)
	defer cancel()
	out := &v1.Event{}
	err := r.Do(ctx).Into(out)
	return out, err
}
