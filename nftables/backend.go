package nftables

import (
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Backend programs one network namespace's nf_tables. It implements [dataplane.Plane]. Its
// methods are safe for concurrent use. Methods called after [Backend.Close] change nothing and
// return an error that wraps [os.ErrClosed].
//
// [New] makes one; the zero value must not be used.
type Backend struct {
	state
}

var _ dataplane.Plane = (*Backend)(nil)

// Limits returns the limits of one Service, which are the same in both families. Apply programs
// a Service that exceeds them with the first endpoints, as many as allowed.
func (b *Backend) Limits(tracker.Family) ruleset.Limits { return model.Limits() }
