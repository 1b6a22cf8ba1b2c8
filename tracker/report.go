package tracker

import (
	"errors"
	"fmt"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// EventSink receives messages that an operator should see at an object, as a
// Kubernetes Event. Event must not block. It must not call the tracker or anything
// that uses the tracker, such as a ruleset.Engine.
type EventSink interface {
	// Event reports a message about the object ref. The reason is one of the Reason
	// constants. The message is free text for people.
	Event(ref v1.ObjectReference, warning bool, reason, message string)
}

// The reasons of events.
const (
	// ReasonInvalid: a part of the object is unusable and was skipped.
	ReasonInvalid = "ProxyInvalidObject"
	// ReasonHookFailed: a hook of [Config] rejected a port or an endpoint.
	ReasonHookFailed = "ProxyHookFailed"
	// ReasonHookWarning: a hook of [Config] accepted a port or an endpoint with a
	// [*WarningError].
	ReasonHookWarning = "ProxyHookWarning"
	// ReasonFrontendConflict: another Service already uses an address and port of
	// this Service. Package ruleset reports it.
	ReasonFrontendConflict = "ProxyFrontendConflict"
	// ReasonLimitExceeded: the Service exceeds a limit of the data plane. Package
	// ruleset reports it.
	ReasonLimitExceeded = "ProxyLimitExceeded"
	// ReasonClosed: none of the Service's source ranges is usable, so its
	// load-balancer addresses accept no traffic.
	ReasonClosed = "ProxySourceRangesUnusable"
)

// WarningError is the error of a hook of [Config] that accepts a port or an endpoint
// and has something to report about it. The tracker logs it and sends an event with
// [ReasonHookWarning]. A wrapped WarningError counts as well. It must not be joined
// with an error that should leave the port or endpoint out.
type WarningError struct {
	// Err is the error to report. It is never nil.
	Err error
}

// Warning returns a [*WarningError] whose message is formatted as by [fmt.Errorf].
func Warning(format string, args ...any) error {
	return &WarningError{fmt.Errorf(format, args...)}
}

// Error returns the message of Err.
func (e *WarningError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *WarningError) Unwrap() error { return e.Err }

func isWarning(err error) bool {
	var w *WarningError
	return errors.As(err, &w)
}

// Event sends a message about a Service to [Config.Events], for callers that find
// problems outside the tracker. The reason is a word in CamelCase, such as one of the
// Reason constants. The message is free text for people. The event's reference has
// the UID of the Service if the tracker has the Service, and otherwise its name only.
func (t *Tracker) Event(service types.NamespacedName, warning bool, reason, message string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.services.mu.Lock()
	defer t.services.mu.Unlock()
	if sink := t.services.builder.reporter.events; sink != nil {
		sink.Event(t.services.reference(service), warning, reason, message)
	}
}

// reporter logs skipped parts of objects and sends events for them.
type reporter struct {
	log    *slog.Logger
	events EventSink
}

// endpoints reports err about endpoints of the Service in ref.
func (r reporter) endpoints(ref v1.ObjectReference, reason string, err error) {
	text := "Skipped endpoints of a Service"
	if reason == ReasonHookWarning {
		text = "Hook warned about endpoints of a Service"
	}
	r.log.Warn(text, "service", ref.Namespace+"/"+ref.Name, "reason", reason, "err", err)
	if r.events != nil {
		r.events.Event(ref, true, reason, err.Error())
	}
}

func (r reporter) service(s *v1.Service, reason string, err error) {
	text := "Skipped part of a Service"
	if reason == ReasonHookWarning {
		text = "Hook warned about a Service"
	}
	r.log.Warn(text, "service", s.Namespace+"/"+s.Name, "reason", reason, "err", err)
	if r.events != nil && s.Name != "" {
		r.events.Event(v1.ObjectReference{
			Kind: "Service", APIVersion: "v1",
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion,
		}, true, reason, err.Error())
	}
}

func (r reporter) slice(s *discovery.EndpointSlice, reason string, err error) {
	text := "Skipped part of an EndpointSlice"
	if reason == ReasonHookWarning {
		text = "Hook warned about an EndpointSlice"
	}
	r.log.Warn(text, "endpointSlice", s.Namespace+"/"+s.Name, "reason", reason, "err", err)
	if r.events != nil && s.Name != "" {
		r.events.Event(v1.ObjectReference{
			Kind: "EndpointSlice", APIVersion: discovery.SchemeGroupVersion.String(),
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion,
		}, true, reason, err.Error())
	}
}

// warnings collects a hook's warnings about one object, so that they are reported
// once.
type warnings struct {
	first error
	n     int
}

func (w *warnings) add(err error) {
	if w.n++; w.n == 1 {
		w.first = err
	}
}

// err returns the first warning with the number of further ones, or nil if there are
// none.
func (w *warnings) err() error {
	if w.n > 1 {
		return fmt.Errorf("%w (and %d more)", w.first, w.n-1)
	}
	return w.first
}
