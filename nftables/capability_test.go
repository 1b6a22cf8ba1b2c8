//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestBackendNeedsOnlyNetAdmin runs all steps of a Backend in a process that has only
// CAP_NET_ADMIN, and in processes without it.
func TestBackendNeedsOnlyNetAdmin(t *testing.T) {
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
		must.Do(t, h.Start(cmd))
		err := cmd.Wait()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(said.String(), c.want)) {
			t.Errorf("with capabilities %v: %v, %s; want %q", c.capabilities, err, said.String(), c.want)
		}
	}
}

// everything runs all steps of a Backend.
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
	return backendtest.Life{
		Cursor: p.cursor,
		Change: func() { p.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(20)...)) },
		Check:  b.Check,
		Inspect: func(ctx context.Context) error {
			f, err := lookUp(ctx, Config{}, netip.MustParseAddrPort("10.96.0.1:80"), v1.ProtocolTCP)
			if err != nil || len(f.Endpoints) != 20 {
				return fmt.Errorf("lookup: %+v, %w", f, err)
			}
			return nil
		},
		Owned:   func(ctx context.Context) (bool, error) { return Owned(ctx, Config{}) },
		Cleanup: func(ctx context.Context) error { return Cleanup(ctx, Config{}) },
	}.Run(ctx)
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
	e, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		return nil, err
	}
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return &agent{t, e, e.Attach("nftables", b)}, nil
}
