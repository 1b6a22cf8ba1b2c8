//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestClosedBackendKeepsReusedDescriptor has a socket of another network namespace take the file
// number of a closed backend's socket. The backend must not use that socket.
func TestClosedBackendKeepsReusedDescriptor(t *testing.T) {
	// Not parallel, because no other test may take the number.
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(0))
	r.sync()
	other := netlab.NewHost(t)
	// Open sockets until one has the number of the backend's socket.
	var conns []*kernel.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	must.Do(t, r.backend.Close())
	for range 8 {
		c := must.Get(kernel.Dial(other.File(), kernel.SendBuffer))(t)
		conns = append(conns, c)
	}
	before := must.Get(conns[0].Generation())(t)
	ctx := context.Background()
	r.cursor.Resync()
	if err := r.cursor.Sync(ctx); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Apply of a full delta returned %v", err)
	}
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	if err := r.cursor.Sync(ctx); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Apply returned %v", err)
	}
	if err := r.backend.Check(ctx); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Check returned %v", err)
	}
	if err := r.backend.Watch(ctx, time.Millisecond, func(err error) { t.Error(err) }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Watch returned %v", err)
	}
	if err := r.backend.Close(); err != nil {
		t.Errorf("a second Close returned %v", err)
	}
	for i, c := range conns {
		after, err := c.Generation()
		if err != nil {
			t.Errorf("another socket, %d: %v", i, err)
		} else if after != before {
			t.Errorf("another network namespace was changed %d times", after-before)
			break
		}
	}
}

// TestLostRefusalsDoNotReachNextRequest sends a transaction with more refusals than the socket
// has room for. The next request must not get one of these answers.
func TestLostRefusalsDoNotReachNextRequest(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	conn := must.Get(kernel.Dial(h.File(), kernel.SendBuffer))(t)
	defer conn.Close()
	var batch nft.Batch
	for range 3 {
		batch.Reset()
		for i := range 30000 {
			batch.Note(fmt.Sprint("table ", i))
			batch.Begin(unix.NFT_MSG_DELTABLE, 0, unix.NFPROTO_IPV4)
			batch.String(unix.NFTA_TABLE_NAME, fmt.Sprint("none-", i))
			batch.End()
		}
		var refused *nfnl.Error
		if err := conn.Commit(&batch); !errors.As(err, &refused) || refused.Errno != unix.ENOENT || refused.What != "table 0" {
			t.Fatalf("Commit returned %v", err)
		}
		for range 100 {
			must.Get(conn.Generation())(t)
		}
		batch.Reset()
		batch.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_IPV4)
		batch.String(unix.NFTA_TABLE_NAME, "some")
		batch.End()
		must.Do(t, conn.Commit(&batch))
	}
}

// TestNewerTableSurvivesKilledSwap starts a new process while both tables are in use. It must
// keep the newer one.
func TestNewerTableSurvivesKilledSwap(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	r.tracker.SetService(svc(0, sticky(1000)))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(3)...))
	r.sync()
	ctx := context.Background()
	for round := range 4 {
		old := r.backend.name
		name := stagingOf(DefaultTable)
		if old == name {
			name = DefaultTable
		}
		found := must.Get(r.backend.inspectAll(old))(t)
		r.tracker.SetSlice(epSlice(0, tracker.IPv4, upTo(4+round)...))
		capture := r.engine.Attach("capture", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
			_, err := r.backend.perform(ctx, d, found, name, (*tables).writeStaged)
			return err
		}))
		must.Do(t, capture.Sync(ctx))
		capture.Detach()
		if out := r.nft("list tables ip"); strings.Count(out, "table ip proxier") != 2 {
			t.Fatalf("tables are %s", out)
		}
		r.start()
		r.sync()
		if r.backend.name != name {
			t.Errorf("round %d: %s was kept, %s is the newer", round, r.backend.name, name)
		}
		r.verify()
	}
}
