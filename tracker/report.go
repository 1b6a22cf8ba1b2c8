package tracker

import (
	"errors"
	"fmt"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/complaint"
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
	// ReasonLimitExceeded: the Service has more than 2,000 ports, 1,000 external or load-balancer
	// IPs, 10,000 combinations of port and address, or 100,000 combinations of port, load-balancer
	// IP and source range, or, as package ruleset reports, exceeds a limit of the data plane or a
	// budget.
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

// reporter logs skipped parts of objects and sends events for them. Each message about an
// object is written once while its text stays the same, and the rate is bounded; see package
// complaint.
type reporter struct {
	log    *complaint.Log
	events EventSink
}

// endpoints reports err about endpoints of the Service in ref.
func (r reporter) endpoints(ref v1.ObjectReference, reason string, err error) {
	r.report("", "endpoints of a Service", "service", ref, reason, err)
}

func (r reporter) service(s *v1.Service, reason string, err error) {
	r.report("part of ", "a Service", "service", reference("Service", "v1", &s.ObjectMeta), reason, err)
}

func (r reporter) slice(s *discovery.EndpointSlice, reason string, err error) {
	ref := reference("EndpointSlice", discovery.SchemeGroupVersion.String(), &s.ObjectMeta)
	r.report("part of ", "an EndpointSlice", "endpointSlice", ref, reason, err)
}

func reference(kind, version string, o *metav1.ObjectMeta) v1.ObjectReference {
	return v1.ObjectReference{
		Kind: kind, APIVersion: version,
		Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion,
	}
}

// report logs err about the object in ref and sends an event. object describes the
// object, and part the part of it that is skipped.
func (r reporter) report(part, object, key string, ref v1.ObjectReference, reason string, err error) {
	text := "Skipped " + part + object
	if reason == ReasonHookWarning {
		text = "Hook warned about " + object
	}
	about := complaint.Object{Kind: key, Namespace: ref.Namespace, Name: ref.Name, UID: string(ref.UID)}
	if r.log.Write(slog.LevelWarn, about, text, "reason", reason, "err", err) && r.events != nil && ref.Name != "" {
		r.events.Event(ref, true, reason, complaint.Text(err.Error()))
	}
}

// summary returns the first error with the number of the others, or nil if there are
// none, so that the errors about one object are reported once.
func summary(errs []error) error {
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return fmt.Errorf("%w (and %d more)", errs[0], len(errs)-1)
}
