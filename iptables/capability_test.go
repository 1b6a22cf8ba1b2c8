//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
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

// lockEnv names the lock file for a process of its own.
const lockEnv = "PROXIER_TEST_LOCK"

// TestLeastPrivilege does everything in processes with few capabilities. CAP_NET_ADMIN is
// enough with iptables-nft. iptables-legacy opens a raw socket, too.
func TestLeastPrivilege(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		t.Parallel()
		h := netlab.NewHost(t)
		admin, raw := unix.CAP_NET_ADMIN, unix.CAP_NET_RAW
		for _, c := range []struct {
			capabilities []int
			enough       bool
		}{
			{[]int{admin, raw}, true},
			{[]int{admin}, flavour == NFT},
			{[]int{raw, unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE}, false},
			{nil, false},
		} {
			var output strings.Builder
			cmd := confine.Command("everything "+string(flavour), confine.Limits{Capabilities: c.capabilities})
			cmd.Env = append(cmd.Env, lockEnv+"="+filepath.Join(t.TempDir(), "lock"))
			cmd.Stderr = &output
			if err := h.Start(cmd); err != nil {
				t.Fatal(err)
			}
			err := cmd.Wait()
			if c.enough && err != nil || !c.enough && (err == nil || !strings.Contains(output.String(), ruleset.ErrUnsupported.Error())) {
				t.Errorf("with capabilities %v: %v, %s", c.capabilities, err, output.String())
			}
		}
	})
}

// everything does all that a Backend can do.
func everything(flavour Flavour) error {
	ctx := context.Background()
	c := Config{Flavour: flavour, LockFile: os.Getenv(lockEnv)}
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
	if err := p.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("first full delta: %w", err)
	}
	p.tracker.SetSlice(slice(0, tracker.IPv4, upTo(20)...))
	if err := p.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("change: %w", err)
	}
	if err := b.Check(ctx); err != nil {
		return fmt.Errorf("check: %w", err)
	}
	p.cursor.Resync()
	if err := p.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("full delta: %w", err)
	}
	if owned, err := Owned(ctx, c); !owned || err != nil {
		return fmt.Errorf("owned: %v, %w", owned, err)
	}
	if err := Cleanup(ctx, c); err != nil {
		return fmt.Errorf("clean-up: %w", err)
	}
	if err := b.Check(ctx); !errors.Is(err, ruleset.ErrNeedFull) {
		return fmt.Errorf("check after clean-up: %w", err)
	}
	return nil
}

// agent is a pipeline in a process of its own.
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
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}})
	if err != nil {
		return nil, err
	}
	e, err := ruleset.NewEngine(ruleset.Config{Tracker: t})
	if err != nil {
		return nil, err
	}
	t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
	return &agent{t, e.Attach("iptables", b), b}, nil
}
