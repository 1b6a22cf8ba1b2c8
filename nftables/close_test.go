//go:build linux

package nftables

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/tracker"
)

// TestClosedBackendKeepsReusedDescriptor has a socket of another network namespace take the file
// number of a closed backend's socket. The backend must not use that socket.
func TestClosedBackendKeepsReusedDescriptor(t *testing.T) {
	t.Parallel()
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
	if err := r.backend.Close(); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		c, err := kernel.Dial(other.File(), kernel.SendBuffer)
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
