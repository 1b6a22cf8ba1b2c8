//go:build linux

package nftables

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/tracker"
)

// TestUseAfterClose has a closed backend's file number taken by a socket of
// another network namespace, which must see nothing of what the backend is told.
func TestUseAfterClose(t *testing.T) {
	// Not parallel: nobody else may take the number.
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(0))
	r.sync()
	other := netlab.NewHost(t)
	// Sockets until one has the number that the backend's had.
	var conns []*nlbatch.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	if err := r.backend.Close(); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		c, err := nlbatch.Dial(other.File())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	before, err := conns[0].Generation()
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	r.cursor.Resync()
	if err := r.cursor.Sync(ctx); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Apply of a full delta says %v", err)
	}
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	if err := r.cursor.Sync(ctx); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Apply says %v", err)
	}
	if err := r.backend.Check(ctx); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Check says %v", err)
	}
	if err := r.backend.Watch(ctx, time.Millisecond, func(err error) { t.Error(err) }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Watch says %v", err)
	}
	if err := r.backend.Close(); err != nil {
		t.Errorf("a second Close says %v", err)
	}
	for i, c := range conns {
		after, err := c.Generation()
		if err != nil {
			t.Errorf("somebody else's socket %d: %v", i, err)
		} else if after != before {
			t.Errorf("somebody else's network namespace was changed %d times", after-before)
			break
		}
	}
}
