package iptables

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) {
	confine.Roles{
		"everything legacy": func() error { return everything(Legacy) },
		"everything nft":    func() error { return everything(NFT) },
		"churn legacy":      func() error { return churn(Legacy) },
		"churn nft":         func() error { return churn(NFT) },
		"few files legacy":  func() error { return fewFiles(Legacy) },
		"few files nft":     func() error { return fewFiles(NFT) },
		"hang":              hang,
		"sysctl":            readOnlySysctl,
	}.Enter()
	netlab.Parallel(6)
	netlab.Main(m)
}

// lockEnv is the environment variable with the lock file of a separate process.
const lockEnv = "PROXIER_TEST_LOCK"

// TestFewCapabilitiesAreEnough uses every function of a Backend in processes with few
// capabilities. CAP_NET_ADMIN is enough with iptables-nft. iptables-legacy opens a raw
// socket, too.
func TestFewCapabilitiesAreEnough(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		h := netlab.NewHost(t)
		admin, raw := unix.CAP_NET_ADMIN, unix.CAP_NET_RAW
		for _, c := range []struct {
			capabilities []int
			enough       bool
		}{
			{[]int{admin, raw}, true},
			{[]int{admin}, flavor == NFT},
			{[]int{raw, unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE}, false},
			{nil, false},
		} {
			var output strings.Builder
			cmd := confine.Command("everything "+string(flavor), confine.Limits{Capabilities: c.capabilities})
			cmd.Env = append(cmd.Env, lockEnv+"="+filepath.Join(t.TempDir(), "lock"))
			cmd.Stderr = &output
			must.Do(t, h.Start(cmd))
			err := cmd.Wait()
			if c.enough && err != nil || !c.enough && (err == nil || !strings.Contains(output.String(), dataplane.ErrUnsupported.Error())) {
				t.Errorf("with capabilities %v: %v, %s", c.capabilities, err, output.String())
			}
		}
	})
}

// everything uses every function of a Backend.
func everything(flavor Flavor) error {
	ctx := context.Background()
	c := Config{Flavor: flavor, LockFile: os.Getenv(lockEnv)}
	p, err := newAgent(ctx, c)
	if err != nil {
		return err
	}
	b := p.backend
	defer b.Close()
	for i := range 50 {
		p.tracker.SetService(svc(i, affinity(100)))
		p.tracker.SetSlice(slice(i, tracker.IPv4, upTo(3)...))
	}
	return backendtest.Life{
		Cursor:  p.cursor,
		Change:  func() { p.tracker.SetSlice(slice(0, tracker.IPv4, upTo(20)...)) },
		Check:   b.Check,
		Owned:   func(ctx context.Context) (bool, error) { return Owned(ctx, c) },
		Cleanup: func(ctx context.Context) error { return Cleanup(ctx, c) },
	}.Run(ctx)
}

// agent is a pipeline in a separate process.
type agent struct {
	tracker *tracker.Tracker
	cursor  *ruleset.Cursor
	backend *Backend
}

func newAgent(ctx context.Context, c Config) (*agent, error) {
	b, err := New(ctx, c)
	if err != nil {
		return nil, err
	}
	p, err := backendtest.NewPipeline(tracker.Config{Node: tracker.NodeInfo{Name: "node"}}, ruleset.Config{})
	if err != nil {
		return nil, err
	}
	return &agent{p.Tracker, p.Engine.Attach("iptables", b), b}, nil
}
