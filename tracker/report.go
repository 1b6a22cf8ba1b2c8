package tracker

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/complaint"
)

// EventSink receives messages that an operator should see at an object, as a Kubernetes Event. Event must not block,
// nor call the tracker or anything that uses the tracker, such as a ruleset.Engine.
type EventSink interface {
	// Event reports a message about the object ref. The reason is the text of a [Reason], or another word in
	// CamelCase.
	Event(ref v1.ObjectReference, warning bool, reason, message string)
}

type warningError struct{ error }

// Warning returns an error, formatted as by [fmt.Errorf], for a hook of [Config] that accepts a port or an endpoint
// and has something to report about it. The tracker logs it and sends an event with [ReasonHookWarning]. A wrapped
// Warning counts, too. It must not be joined with an error that should leave the port or endpoint out.
func Warning(format string, args ...any) error { return warningError{fmt.Errorf(format, args...)} }

// Unwrap returns the error without the mark.
func (e warningError) Unwrap() error { return e.error }

func hookReason(err error) Reason {
	if errors.As(err, new(warningError)) {
		return ReasonHookWarning
	}
	return ReasonHookFailed
}

// Event sends a message about a Service to [Config.Events], for callers that find problems outside the tracker. The
// reason is one of the Reason constants or another word in CamelCase. The event's reference has the UID of the
// Service if the tracker has the Service.
func (t *Tracker) Event(service types.NamespacedName, warning bool, reason Reason, message string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.services.mu.Lock()
	defer t.services.mu.Unlock()
	if sink := t.services.builder.reporter.events; sink != nil {
		sink.Event(t.services.reference(service), warning, string(reason), message)
	}
}

// reporter logs what is left out of objects, and sends events for it, each message once while its text stays the
// same, and at a bounded rate; see package complaint.
type reporter struct {
	log    *complaint.Log
	events EventSink
	hook   func(v1.ObjectReference, []LeftOut)
}

func newReporter(c Config) reporter { return reporter{complaint.NewLog(c.Log), c.Events, c.OnLeftOut} }

// Bounds of a report about one object, which may have thousands of invalid parts.
const (
	// maxLeftOut is the number of parts that Config.OnLeftOut gets.
	maxLeftOut = 1000
	// maxTexts is the number of parts in one line of the log.
	maxTexts = 4
)

// leftOuts collects what is left out of one object. The zero value is empty.
type leftOuts struct {
	all []LeftOut
	// reasons groups those that are not expected.
	reasons []leftOutReason
}

type leftOutReason struct {
	reason Reason
	texts  []string
	more   int
}

func (l *leftOuts) add(o LeftOut) {
	if len(l.all) < maxLeftOut {
		l.all = append(l.all, o)
	}
	if o.Expected {
		return
	}
	i := slices.IndexFunc(l.reasons, func(k leftOutReason) bool { return k.reason == o.Reason })
	if i < 0 {
		i = len(l.reasons)
		l.reasons = append(l.reasons, leftOutReason{reason: o.Reason})
	}
	if k := &l.reasons[i]; len(k.texts) < maxTexts {
		k.texts = append(k.texts, o.Err.Error())
	} else {
		k.more++
	}
}

func (r reporter) service(s *v1.Service, l *leftOuts) {
	if len(l.all) == 0 {
		return
	}
	r.report("part of ", "a Service", "service", reference("Service", "v1", &s.ObjectMeta), l)
}

func (r reporter) slice(s *discovery.EndpointSlice, l *leftOuts) {
	if len(l.all) == 0 {
		return // without the text of a reference
	}
	ref := reference("EndpointSlice", discovery.SchemeGroupVersion.String(), &s.ObjectMeta)
	r.report("part of ", "an EndpointSlice", "endpointSlice", ref, l)
}

func reference(kind, version string, o *metav1.ObjectMeta) v1.ObjectReference {
	return v1.ObjectReference{
		Kind: kind, APIVersion: version,
		Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion,
	}
}

// report reports what is left out of the object in ref, with one line and one event for each reason, and empties l.
// object describes the object, and part the part that is left out.
func (r reporter) report(part, object, key string, ref v1.ObjectReference, l *leftOuts) {
	if len(l.all) == 0 {
		return
	}
	about := complaint.Object{Kind: key, Namespace: ref.Namespace, Name: ref.Name, UID: string(ref.UID)}
	for _, k := range l.reasons {
		what := "Skipped " + part + object
		if k.reason == ReasonHookWarning {
			what = "Hook warned about " + object
		}
		text := strings.Join(k.texts, "; ")
		if k.more > 0 {
			text += fmt.Sprintf(" (and %d more)", k.more)
		}
		if r.log.Write(slog.LevelWarn, about, what, "reason", string(k.reason), "err", text) && r.events != nil && ref.Name != "" {
			r.events.Event(ref, true, string(k.reason), complaint.Text(text))
		}
	}
	if r.hook != nil {
		r.hook(ref, l.all)
	}
	*l = leftOuts{}
}
