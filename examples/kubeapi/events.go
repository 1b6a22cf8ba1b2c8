package kubeapi

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
)

// Recorder writes Events with client-go's recorder: in the background, with similar Events
// combined and the rate limited. Its method Event is a tracker.EventSink. Its methods are
// safe for concurrent use.
type Recorder struct {
	b    record.EventBroadcaster
	r    record.EventRecorder
	node *v1.ObjectReference
	sink *sink
}

// NewRecorder returns a Recorder for the agent of a node. core is a client of the core API group:
// Client.Core, or CoreV1().RESTClient() of client-go's clientset. The caller must call Shutdown.
//
// At most once a minute, the Recorder logs that the API server refuses an Event. It repeats a request
// that the API server did not answer, and logs that as a debug message: what follows the objects logs the cause of an
// outage.
func NewRecorder(core rest.Interface, component, node string, log *slog.Logger) *Recorder {
	// client-go would log every attempt, and whole Events.
	quiet := klog.NewContext(context.Background(), logr.Discard())
	b := record.NewBroadcaster(record.WithContext(quiet))
	s := &sink{c: core, log: log}
	s.ctx, s.end = context.WithCancel(context.Background())
	b.StartRecordingToSink(s)
	return &Recorder{
		b: b,
		// A scheme would determine the kinds of objects, but all objects are references,
		// which hold their kind.
		r: b.NewRecorder(runtime.NewScheme(), v1.EventSource{Component: component, Host: node}),
		// kubelet and kube-proxy use the node's name as the UID too.
		node: &v1.ObjectReference{Kind: "Node", Name: node, UID: types.UID(node)},
		sink: s,
	}
}

// Shutdown ends the Recorder. Events that are not yet written may be lost.
func (r *Recorder) Shutdown() {
	r.b.Shutdown()
	r.sink.end()
	r.sink.running.Lock() // waits for the last request
	defer r.sink.running.Unlock()
}

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

// sink writes Events to the API server.
type sink struct {
	c   rest.Interface
	log *slog.Logger

	// ctx ends with the Recorder, and with it the requests that run.
	ctx context.Context
	end context.CancelFunc
	// running is held while a request runs.
	running sync.Mutex
	logged  time.Time // when a refusal was logged
}

// refusalInterval is the least time between two lines about refused Events.
const refusalInterval = time.Minute

// Create writes a new Event.
func (s *sink) Create(e *v1.Event) (*v1.Event, error) {
	return s.do(e, s.c.Post().NamespaceIfScoped(e.Namespace, true).Resource("events").Body(e))
}

// Update replaces an Event.
func (s *sink) Update(e *v1.Event) (*v1.Event, error) {
	return s.do(e, s.c.Put().NamespaceIfScoped(e.Namespace, true).Resource("events").Name(e.Name).Body(e))
}

// Patch changes an Event.
func (s *sink) Patch(e *v1.Event, data []byte) (*v1.Event, error) {
	return s.do(e, s.c.Patch(types.StrategicMergePatchType).NamespaceIfScoped(e.Namespace, true).Resource("events").Name(e.Name).Body(data))
}

func (s *sink) do(e *v1.Event, r *rest.Request) (*v1.Event, error) {
	s.running.Lock()
	defer s.running.Unlock()
	if err := s.ctx.Err(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(s.ctx, requestTimeout)
	defer cancel()
	out := &v1.Event{}
	err := r.Do(ctx).Into(out)
	s.report(e, err)
	return out, err
}

// report logs the error of a request, if any. The caller holds s.running.
func (s *sink) report(e *v1.Event, err error) {
	level := slog.LevelDebug
	var status apierrors.APIStatus
	switch {
	case err == nil,
		apierrors.IsNotFound(err),      // of a patch; the recorder creates the Event again
		apierrors.IsAlreadyExists(err), // an earlier answer was lost
		apierrors.HasStatusCause(err, v1.NamespaceTerminatingCause):
		return
	case errors.As(err, &status):
		if time.Since(s.logged) > refusalInterval {
			level, s.logged = slog.LevelWarn, time.Now()
		}
	}
	s.log.Log(context.Background(), level, "cannot write an Event", "reason", e.Reason, "about", e.InvolvedObject.Name, "error", err)
}
