package tracker

import (
	"errors"
	"fmt"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// EventSink is told of what an operator should see at the object itself, as a
// Kubernetes Event. Event must not block, and must not call the tracker nor anything
// that uses it, such as a ruleset.Engine.
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
	// ReasonHookWarning: a hook of [Config] accepted a port or an endpoint with a
	// [*WarningError].
	ReasonHookWarning = "ProxyHookWarning"
	// ReasonFrontendConflict: another Service has an address and port that the
	// Service asks for, which does without it. Package ruleset finds this.
	ReasonFrontendConflict = "ProxyFrontendConflict"
	// ReasonLimitExceeded: the Service asks for more than a data plane can do.
	// Package ruleset finds this.
	ReasonLimitExceeded = "ProxyLimitExceeded"
	// ReasonClosed: no source range of the Service can be used though some are
	// given, so that its load-balancer addresses are closed to everyone.
	ReasonClosed = "ProxySourceRangesUnusable"
)

// WarningError is returned by a hook of [Config] that accepts a port or an endpoint
// but has something to report about it. It is logged, and becomes an event with
// [ReasonHookWarning]. It counts when it is wrapped, too; it must not be joined
// with an error that is to leave something out.
type WarningError struct {
	// Err is what to report, never nil.
	Err error
}

// Warning returns a [*WarningError] for a formatted message, as [fmt.Errorf] does.
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

// Event passes something about a Service to [Config.Events], for callers that find
// what the tracker itself does not. The reason is a word in CamelCase, such as one
// of the Reason constants; the message is for people. The event refers to the
// Service as it was last handed in, or by its name alone if the tracker does not
// have it.
func (t *Tracker) Event(service types.NamespacedName, warning bool, reason, message string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.services.mu.Lock()
	defer t.services.mu.Unlock()
	if sink := t.services.builder.reporter.events; sink != nil {
		sink.Event(t.services.reference(service), warning, reason, message)
	}
}

// reporter logs what is skipped and makes it an event.
type reporter struct {
	log    *slog.Logger
	events EventSink
}

// endpoints reports something about endpoints of the Service that ref refers to.
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

// warnings collects the warnings of a hook about one object, to be reported once.
type warnings struct {
	first error
	n     int
}

func (w *warnings) add(err error) {
	if w.n++; w.n == 1 {
		w.first = err
	}
}

// err returns the first warning and how many there were, nil for none.
func (w *warnings) err() error {
	if w.n > 1 {
		return fmt.Errorf("%w (and %d more)", w.first, w.n-1)
	}
	return w.first
}
