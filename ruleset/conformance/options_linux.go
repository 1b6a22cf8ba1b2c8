package conformance

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Main is for the TestMain of a package that calls [Run] or [NewWorld]. It runs
// the tests as root of new user and network namespaces and exits with their
// status. Where these cannot be made it runs the tests all the same, and the
// package's worlds are skipped.
func Main(m *testing.M) { netlab.Main(m) }

// Options says what is tested.
type Options struct {
	// New makes the backend of one world; required. It is called, as every Apply
	// is, on a thread inside the node's network namespace. What must be undone
	// when the world ends goes to tb.Cleanup.
	New func(tb testing.TB, env Env) ruleset.Backend
	// Families is the address families to test, nil for both.
	Families []tracker.Family
	// Skip says what the backend does not do, and why. Worlds that are about it
	// are skipped with that reason, and in the others the connections that are. Nil
	// means that it does everything.
	Skip map[Feature]string
	// Client, if not nil, is called for each connection from the node and from its pods. It
	// calls f once, which opens the client's socket in its network namespace, on the thread
	// that it calls f on, and returns f's error. It is for data planes that recognise the
	// node's processes by something other than network namespaces, such as a cgroup that
	// Client moves the thread to. It is called by several goroutines at once.
	Client func(env Env, f func() error) error
	// Masquerades, if not nil, replaces [ruleset.Verdict.MasqueradeTo]: it reports whether an
	// endpoint must see an address of the node in place of the source of p. It is for data
	// planes that masquerade otherwise than the ruleset asks, and document it.
	Masquerades func(p ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool

	// run, if not nil, adds up what the worlds of a run excuse.
	run *excuses

	// The rest is for tests of the suite itself. timeout and silence replace the
	// constants if not 0: for backends that are to fail, in one way or the other.
	timeout, silence time.Duration
	// stalled pretends that the machine stalls all the time, and delay makes every
	// connection that measures a time so much later.
	stalled bool
	delay   time.Duration
}

// Env is where a backend finds itself.
type Env struct {
	// NetNS is an open file of the node's network namespace. It is open until the test
	// ends.
	NetNS *os.File
	// Families is the address families in use.
	Families []tracker.Family

	do func(func() error) error
}

// Do runs f on a thread inside the node's network namespace, where a backend may
// open sockets that it needs later than in New and Apply. Goroutines that f starts
// do not run inside. It may be called from any goroutine, until the test ends. The
// error is f's, or why the namespace could not be entered.
func (e Env) Do(f func() error) error { return e.do(f) }

// validate says what is wrong with the options.
func (o Options) validate() error {
	if o.New == nil {
		return errors.New("conformance: Options.New is required")
	}
	_, err := validFamilies(o.Families)
	return err
}

// masquerades reports whether ep must see an address of the node.
func (o Options) masquerades(p ruleset.Packet, v ruleset.Verdict, ep *tracker.Endpoint) bool {
	if o.Masquerades != nil {
		return o.Masquerades(p, v, ep)
	}
	return v.MasqueradeTo(ep)
}

// families returns the families under test.
func (o Options) families() []tracker.Family {
	if o.Families == nil {
		return []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	return o.Families
}
