//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestLeastPrivilege has a process with nothing but CAP_NET_ADMIN, or without
// it, do all that a Backend does.
func TestLeastPrivilege(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	for _, c := range []struct {
		capabilities []int
		want         string
	}{
		{[]int{unix.CAP_NET_ADMIN}, ""},
		{nil, unix.EPERM.Error()},
		{[]int{unix.CAP_NET_RAW, unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE}, unix.EPERM.Error()},
	} {
		var said strings.Builder
		cmd := confine.Command("everything", confine.Limits{Capabilities: c.capabilities})
		cmd.Stderr = &said
		if err := h.Start(cmd); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(said.String(), c.want)) {
			t.Errorf("with capabilities %v: %v, %s; want %q", c.capabilities, err, said.String(), c.want)
		}
	}
}

// everything is what a Backend does from its first day to its last.
func everything() error {
	ctx := context.Background()
	b, err := New(ctx, Config{})
	if err != nil {
		return err
	}
	defer b.Close()
	p, err := newAgent(b)
	if err != nil {
		return err
	}
	for i := range 50 {
		p.tracker.SetService(svc(i, sticky(100)))
		p.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(3)...))
	}
	if err := p.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("first full delta: %w", err)
	}
	p.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(20)...))
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
	if f, err := lookUp(ctx, Config{}, netip.MustParseAddrPort("10.96.0.1:80"), v1.ProtocolTCP); err != nil || len(f.Endpoints) != 20 {
		return fmt.Errorf("lookup: %+v, %w", f, err)
	}
	if err := Cleanup(ctx, Config{}); err != nil {
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
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
}

func newAgent(b ruleset.Backend) (*agent, error) {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}})
	if err != nil {
		return nil, err
	}
	e, err := ruleset.NewEngine(ruleset.Config{Tracker: t})
	if err != nil {
		return nil, err
	}
	t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
	return &agent{t, e, e.Attach("nftables", b)}, nil
}
