package ruleset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"time"

	"github.com/go-proxier/proxier/tracker"
)

// Backend is a data plane, or anything else that follows the ruleset. See the
// package documentation for how to write one.
//
// Apply makes the data plane agree with d. It is called by one goroutine at a
// time for each [Cursor] and must not keep d.Changes. It must be idempotent: a
// delta whose Apply failed is offered again, merged with what came since. It
// returns
//
//   - nil: everything in d is in effect;
//   - a [*PartialError] (perhaps wrapped): everything but the Services it names is.
//     A Service that loses a frontend to one of those counts as named too: its
//     frontend may still be in use;
//   - an error that is [ErrNeedFull]: nothing can be said of the data plane, the
//     whole state is offered at once;
//   - any other error: nothing in d is acknowledged; all of it is offered again.
type Backend interface {
	Apply(ctx context.Context, d *Delta) error
}

// BackendFunc is a function that is a [Backend].
type BackendFunc func(context.Context, *Delta) error

// Apply calls f.
func (f BackendFunc) Apply(ctx context.Context, d *Delta) error { return f(ctx, d) }

// ErrNeedFull is returned by a [Backend] that cannot go on from what it has, for
// example because its tables were deleted, and wants the whole state. A backend that
// failed wraps it together with the cause. One that only has to start over, because the
// node's settings changed for example, returns ErrNeedFull itself; callers that count
// failures can tell the two apart.
var ErrNeedFull = errors.New("ruleset: backend needs the full state")

// PartialError is returned by a [Backend] that could apply a delta but for some
// Services.
type PartialError struct {
	// Failed says why, for each Service that failed. Keys that were not in the
	// delta have no effect.
	Failed map[tracker.Key]error
}

// Error names the first few Services that failed and why.
func (e *PartialError) Error() string {
	keys := make([]tracker.Key, 0, len(e.Failed))
	for k := range e.Failed {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, tracker.Key.Compare)
	var b strings.Builder
	fmt.Fprintf(&b, "%d services failed", len(keys))
	for i, k := range keys {
		if i == 3 {
			b.WriteString("; ...")
			break
		}
		fmt.Fprintf(&b, "; %s: %v", k, e.Failed[k])
	}
	return b.String()
}

// Unwrap returns the errors of all Services.
func (e *PartialError) Unwrap() []error {
	out := make([]error, 0, len(e.Failed))
	for _, err := range e.Failed {
		out = append(out, err)
	}
	return out
}

// Delta is what one backend must do to agree with the ruleset.
type Delta struct {
	// Full means that Changes holds every Service there is, each with Old as last
	// acknowledged (nil if never), plus those to be removed; and that whatever else
	// the data plane holds is stale and must go.
	Full bool
	// Gen is the ruleset's generation that this delta leads to. It only grows.
	Gen uint64
	// Node is the node as it is now, never nil. OldNode is what the backend last
	// acknowledged, nil at first; it is the same pointer as Node when nothing
	// changed. A [*PartialError] acknowledges Node.
	Node, OldNode *Node
	// Changes is sorted by key unless Full. A Service that takes over a frontend
	// ([Change.TakenFrontends]) is the exception: it comes before the Service that
	// had the frontend. Where Services take frontends from each other in a circle,
	// no order has this property; the numbered steps of the package documentation
	// need none.
	Changes []Change
	// Triggers is the causes of the endpoint changes in this delta that were not
	// acknowledged before, for measuring network programming latency. While a
	// backend fails for long, only the oldest few thousand are kept.
	Triggers []Trigger
}

// Trigger says when changes to a Service's endpoints were caused.
type Trigger struct {
	// Service is whose endpoints were changed.
	Service types.NamespacedName
	// Times is when each change was caused, by the clock of the component that caused it
	// (annotation endpoints.kubernetes.io/last-change-trigger-time).
	Times []time.Time
}

// Field is a set of bits that say what differs between two [Service] values.
type Field uint16

// What can differ. Together the bits cover all of a Service but its ID: a value
// that a backend derives from a Service changes only if a bit is set that stands
// for something it was derived from. A Service that is new, gone, or whose last
// attempt failed has all bits.
const (
	// FieldFrontends: a frontend was added, removed or treats connections
	// differently. An entry for a frontend that also holds the affinity timeout, the
	// hash, an extension or the size of a pool depends on the bits for those as well.
	FieldFrontends Field = 1 << iota
	// FieldCluster and FieldLocal: the pool's endpoints, something about one of them,
	// or whether there is such a pool at all: Selection.UsesCluster or UsesLocal. A
	// pool that exists may be empty.
	FieldCluster
	FieldLocal
	// FieldAffinity: the affinity timeout, Port.Affinity.
	FieldAffinity
	// FieldOther: anything else about the ServicePort, such as a health-check node
	// port or a policy that changes no frontend, or Selection.HasAny or Mode.
	FieldOther
	// FieldHash: the part of a connection that its endpoint follows from, Port.Hash,
	// or the size of the table of slots, Port.HashSlots.
	FieldHash
	// FieldExt: the extension of the Service port, Port.Ext.
	FieldExt
	// FieldEndpoints: something about the known endpoints, Service.Endpoints, whether
	// in a pool or not. It is set along with FieldCluster or FieldLocal when an
	// endpoint of a pool changed, and alone when only endpoints in no pool did.
	FieldEndpoints

	FieldAll = FieldFrontends | FieldCluster | FieldLocal | FieldAffinity | FieldOther | FieldHash |
		FieldExt | FieldEndpoints
)

// String returns the names of the bits separated by "|", such as
// "frontends|cluster", "all" for FieldAll and "none" for 0.
func (f Field) String() string {
	switch f {
	case 0:
		return "none"
	case FieldAll:
		return "all"
	}
	var names []string
	for i, name := range []string{"frontends", "cluster", "local", "affinity", "other", "hash", "ext", "endpoints"} {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if rest := f &^ FieldAll; rest != 0 {
		names = append(names, fmt.Sprintf("%#x", uint16(rest)))
	}
	return strings.Join(names, "|")
}

// Change is what happened to one Service.
type Change struct {
	// Key is the Service port's, in one family.
	Key tracker.Key
	// Old is what the backend last acknowledged, nil if nothing. New is what must
	// be, nil if the Service is gone. They are never both nil, unless Attempted is
	// not empty.
	Old, New *Service
	// What tells in what they differ.
	What Field
	// Attempted is what was offered since Old and failed, oldest first: parts of
	// it may be in effect. It is almost always empty.
	Attempted []*Service

	// lost is the frontends of Old and Attempted that another Service has now, with the
	// key of that Service. taken is the reverse: the frontends of New in the lost of
	// another Change of the same delta, with the key of that Change.
	lost, taken []move
}

// move is a frontend and the Service at the other end of a takeover.
type move struct {
	at  l4Key
	key tracker.Key
}
