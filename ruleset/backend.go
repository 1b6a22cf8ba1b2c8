package ruleset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// Backend is a data plane, or anything else that follows the ruleset. BACKEND.md describes how to write one and
// defines the words below.
//
// Apply makes the data plane agree with d. Each [Cursor] calls it from one goroutine at a time. It must not keep
// d.Changes. It returns one of these:
//
//   - nil: all of d is in effect.
//   - A [*PartialError], perhaps wrapped: all of d is in effect except the Services that it names. These are offered
//     again with FieldAll, merged with later changes.
//   - Any other error: nothing is acknowledged, and all of d is offered again with FieldAll. If the error wraps
//     [ErrNeedFull], the same [Cursor.Sync] offers the whole state.
//
// Parts of a Service that failed may be in effect. The Backend knows from its own records what it wrote, or returns
// ErrNeedFull. A Change with neither Old nor New asks to remove such parts. After a Full delta that is answered with
// nil or a PartialError, nothing is stale but parts of the named Services. A Service that loses a frontend to a named
// one counts as named: see [Change.Acknowledged].
type Backend interface {
	Apply(ctx context.Context, d *Delta) error
}

// BackendFunc is a function that implements [Backend].
type BackendFunc func(context.Context, *Delta) error

// Apply calls f.
func (f BackendFunc) Apply(ctx context.Context, d *Delta) error { return f(ctx, d) }

// ErrNeedFull is returned by a [Backend] that needs the whole state, for example because its tables were deleted. A
// backend that failed wraps it together with the cause. A backend that only has to start over, for example because
// the node's settings changed, returns ErrNeedFull itself.
var ErrNeedFull = errors.New("ruleset: backend needs the full state")

// ErrConfig is wrapped by errors about a Config from [NewEngine] and from the kernel
// backends' functions. Retrying with the same Config is useless.
var ErrConfig = errors.New("invalid configuration")

// PartialError is returned by a [Backend] that applied a delta except for some Services.
type PartialError struct {
	// Failed holds the error of each of these Services. Keys that are not in the delta have no
	// effect.
	Failed map[tracker.Key]error
}

// Error returns the number of failed Services and the first few with their errors.
func (e *PartialError) Error() string {
	keys := slices.SortedFunc(maps.Keys(e.Failed), tracker.Key.Compare)
	var b strings.Builder
	fmt.Fprintf(&b, "%d services failed", len(keys))
	for i, k := range keys {
		if i == 3 {
			b.WriteString("; ...")
			break
		}
		fmt.Fprintf(&b, "; %s: %s", complaint.Name(k.String()), complaint.Text(fmt.Sprint(e.Failed[k])))
	}
	return b.String()
}

// Unwrap returns the errors of all Services.
func (e *PartialError) Unwrap() []error {
	return slices.Collect(maps.Values(e.Failed))
}

// Delta holds the changes that one backend must apply to agree with the ruleset. Its methods
// may be called from any goroutine during Apply.
type Delta struct {
	// Full means that Changes holds every Service, each with Old as last acknowledged
	// (nil if never), and every Service to remove. Everything else in the data plane
	// is stale and must be removed.
	Full bool
	// Gen is the generation of the ruleset after this delta. It only grows.
	Gen uint64
	// Node is the current node, never nil. OldNode is the last one that the backend acknowledged, nil at first; the
	// same pointer if the node did not change. A [*PartialError] acknowledges Node.
	Node, OldNode *Node
	// Changes is sorted by key unless Full, except that a Service that takes over a frontend
	// ([Change.TakenFrontends]) comes before the Service that had it, unless Services exchange frontends in a circle.
	Changes []Change
	// Triggers holds the times of the endpoint changes in this delta that were not acknowledged before, for measuring
	// network programming latency. If a backend fails for long, only the oldest few thousand are kept.
	Triggers []Trigger
	// More means that the same [Cursor.Sync] offers another delta after this one, unless this one fails.
	More bool
}

// Trigger holds the times at which changes to a Service's endpoints were caused.
type Trigger struct {
	// Service is the name of the Service.
	Service types.NamespacedName
	// Times holds the time of each change, by the clock of the component that caused
	// it (annotation endpoints.kubernetes.io/last-change-trigger-time).
	Times []time.Time
}

// Field is a set of bits for the parts in which two [Port] values differ.
type Field uint16

// The bits of Field. Together they cover all of a Service except its ID. A Service that is new, removed, or whose
// last attempt failed has all bits.
const (
	// FieldFrontends: a frontend was added, was removed or handles connections differently. The first and the last
	// endpoint of a pool set it, because Frontend.Target then changes. An entry that also contains the affinity
	// timeout, the hash, an extension or the size of a pool depends on the bits of these as well.
	FieldFrontends Field = 1 << iota
	// FieldCluster and FieldLocal: the pool's endpoints, or a property of one of them.
	FieldCluster
	FieldLocal
	// FieldAffinity: the affinity timeout, Port.Spec.Affinity.
	FieldAffinity
	// FieldOther: anything else in the ServicePort, such as a health-check node port
	// or a policy that changes no frontend, or Selection.HasAny.
	FieldOther
	// FieldHash: the part of a connection that determines its endpoint, Port.Hash, or
	// the size of the hash table, Port.HashBuckets.
	FieldHash
	// FieldExt: the extension of the Service port, Port.Spec.Ext.
	FieldExt
	// FieldEndpoints: the known endpoints, Port.Endpoints, whether in a pool or not. It is set alone if only
	// endpoints outside the pools changed.
	FieldEndpoints
	// FieldPools: a pool came into existence or ceased to exist, whatever its endpoints;
	// see Port.HasPool.
	FieldPools

	FieldAll = FieldFrontends | FieldCluster | FieldLocal | FieldAffinity | FieldOther | FieldHash |
		FieldExt | FieldEndpoints | FieldPools
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
	for i, name := range []string{"frontends", "cluster", "local", "affinity", "other", "hash", "ext", "endpoints", "pools"} {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if rest := f &^ FieldAll; rest != 0 {
		names = append(names, fmt.Sprintf("%#x", uint16(rest)))
	}
	return strings.Join(names, "|")
}

// Change describes the change of one Service. It is immutable and may be read from any goroutine. It
// cannot be encoded: what its methods yield depends on the other Services at that time.
type Change struct {
	// Key is the key of the Service port, in one family.
	Key tracker.Key
	// Old is the Service that the backend last acknowledged, or nil. New is the wanted Service, or nil if it was
	// removed. Both are nil if a Service that failed is no longer wanted.
	Old, New *Port
	// Fields holds the parts in which Old and New differ. It is FieldAll in a Full delta, and if the last
	// attempt failed.
	Fields Field

	id uint32
	// lost holds the frontends of Old that another Change of the same delta takes, with the key of
	// that Change. taken is the reverse.
	lost, taken []move
}

// move is a frontend and the other Service of its takeover.
type move struct {
	at  l4Key
	key tracker.Key
}

func (m move) frontend() l4Key { return m.at }
