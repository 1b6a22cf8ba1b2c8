package conformance

import (
	"errors"
	"io/fs"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Main is for the TestMain of a package that calls [Run] or [NewWorld]. It runs the tests as root of new user and
// network namespaces and exits with their status. If the namespaces cannot be made, the worlds of the package are
// skipped.
func Main(m *testing.M) { netlab.Main(m) }

// Options configures the tests.
type Options struct {
	// New makes the backend of one world and is required. It is called, as every
	// Apply is, on a thread in the node's network namespace. It registers clean-up
	// with tb.Cleanup.
	New func(tb testing.TB, env Env) ruleset.Backend
	// Families lists the address families to test. Nil means both.
	Families []tracker.Family
	// Skip lists the features that the backend does not support, with a reason. Worlds about such a feature are
	// skipped, and so are connections about it in other worlds. Nil means that the backend supports everything.
	Skip map[Feature]string
	// Client, if not nil, is called for each connection from the node and from its pods, concurrently. It must call f
	// once and return f's error. f opens the client's socket in its network namespace, on the calling thread. Client
	// is for data planes that identify processes by something else, such as a cgroup.
	Client func(env Env, f func() error) error
	// Masquerades, if not nil, replaces [ruleset.Verdict.MasqueradeTo], for data planes that document a different way
	// of masquerading. It reports whether an endpoint must see an address of the node in place of the source of p.
	Masquerades func(p ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool
	// EndsSockets means that the data plane ends connected UDP sockets whose endpoint leaves its Service, with
	// ECONNABORTED. In worlds whose endpoints change under load, clients then ask again with another socket.
	EndsSockets bool
	// Observe, if not nil, is called with the first packet of each connection that a world compares with Trace, and
	// with the result: [ruleset.ActionForward] if a server answered, which is then the only endpoint;
	// [ruleset.ActionReject]; or, without an answer, [ruleset.ActionDrop]. w does not change its Tracker and Engine
	// before Observe returns. Calls for one World are concurrent. Connections during a change, and those to which
	// Skip applies, are left out.
	Observe func(w *World, p ruleset.Packet, o Outcome)

	// Scripts, if not nil, is a folder with worlds that Run runs after those of the suite, in
	// files *.txt. README.md of the folder worlds describes them.
	Scripts fs.FS

	// run, if not nil, sums the excused connections of the worlds of a run.
	run *excuses

	// The fields below are for tests of the suite itself. timeout and silence replace
	// the constants if not 0, for backends that must fail.
	timeout, silence time.Duration
	// stalled simulates a machine that always stalls. delay postpones each connection
	// of tests that measure time.
	stalled bool
	delay   time.Duration
}

// validate returns the families under test, or an error if the options are invalid.
func (o Options) validate() ([]tracker.Family, error) {
	if o.New == nil {
		return nil, errors.New("conformance: Options.New is required")
	}
	return validFamilies(o.Families)
}
