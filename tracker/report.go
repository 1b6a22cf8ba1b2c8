package tracker

import (
	"log/slog"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// EventSink is told of what an operator should see at the object itself, as a
// Kubernetes Event. Event must not block, and must not call the tracker.
type EventSink interface {
	// Event says that something was noticed about the object ref. The reason is one
	// of the Reason constants, the message is for people.
	Event(ref v1.ObjectReference, warning bool, reason, message string)
}

// The reasons of events.
const (
	// ReasonInvalid: something in the object cannot be used and was skipped.
	ReasonInvalid = "ProxyInvalidObject"
	// ReasonHookFailed: a hook of [Config] refused a port or an endpoint, which was
	// skipped.
	ReasonHookFailed = "ProxyHookFailed"
	// ReasonClosed: no source range of the Service can be used though some are
	// given, so that its load-balancer addresses are closed to everyone.
	ReasonClosed = "ProxySourceRangesUnusable"
)

// reporter tells of what is skipped.
type reporter struct {
	log    *slog.Logger
	events EventSink
}

func (r reporter) service(s *v1.Service, reason string, err error) {
	r.log.Warn("Skipped part of a Service", "service", s.Namespace+"/"+s.Name, "reason", reason, "err", err)
	if r.events != nil && s.Name != "" {
		r.events.Event(v1.ObjectReference{
			Kind: "Service", APIVersion: "v1",
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion,
		}, true, reason, err.Error())
	}
}

func (r reporter) slice(s *discovery.EndpointSlice, reason string, err error) {
	r.log.Warn("Skipped part of an EndpointSlice", "endpointSlice", s.Namespace+"/"+s.Name, "reason", reason, "err", err)
	if r.events != nil && s.Name != "" {
		r.events.Event(v1.ObjectReference{
			Kind: "EndpointSlice", APIVersion: discovery.SchemeGroupVersion.String(),
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion,
		}, true, reason, err.Error())
	}
}
