//go:build linux

package ipvs

import (
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) {
	confine.Roles{
		"everything":        func() error { return everything(iptables.NFT) },
		"everything legacy": func() error { return everything(iptables.Legacy) },
		"churn":             changeEndpoints,
		"faults":            faults,
		"sysctl":            readOnlySysctls,
	}.Enter()
	os.Exit(m.Run())
}

// needed lists the capabilities that a Backend needs.
var needed = []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}

// agent is a pipeline in a separate process.
type agent struct {
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
}

func newAgent(c Config) (*agent, error) {
	b, err := New(context.Background(), c)
	if err != nil {
		return nil, err
	}
	p, err := backendtest.NewPipeline(tracker.Config{Node: tracker.NodeInfo{Name: "node"}}, ruleset.Config{})
	if err != nil {
		return nil, err
	}
	return &agent{p.Tracker, p.Engine, p.Engine.Attach("ipvs", b), b}, nil
}

// inMachine reports whether the running kernel has IPVS. If not, it runs the test in a virtual
// machine that has it, beside the other tests that call inMachine. It skips the test unless all
// tests must run.
func inMachine(t *testing.T) bool {
	t.Helper()
	testtime.NeedComplete(t)
	t.Parallel()
	return vm.Inside(t, vm.IPVS, "")
}
