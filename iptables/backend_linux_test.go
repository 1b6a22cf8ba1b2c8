package iptables

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"k8s.io/apimachinery/pkg/types"
)

// TestLockedTablesStayAsTheyAre holds the xtables lock for longer than the backend waits.
func TestLockedTablesStayAsTheyAre(t *testing.T) {
	needFlavor(t, Legacy)
	t.Parallel()
	r := newRig(t, onLinux(Legacy))
	r.set(0, []int{1})
	r.sync()
	lock, err := os.OpenFile(r.config.LockFile, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	r.setEndpoints(0, 1, 2)
	if err := r.cursor.Sync(context.Background()); !errors.Is(err, ErrLocked) || errors.Is(err, ruleset.ErrNeedFull) {
		t.Fatalf("%v, want ErrLocked", err)
	}
	if err := r.backend.Check(context.Background()); !errors.Is(err, ErrLocked) {
		t.Errorf("Check: %v, want ErrLocked", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	r.sync()
	r.verify()
}

// TestTooLargeServiceFailsAlone applies a Service with a chain that is too large for one
// message to the kernel.
func TestTooLargeServiceFailsAlone(t *testing.T) {
	needFlavor(t, NFT)
	t.Parallel()
	r := newRig(t, onLinux(NFT))
	r.set(0, []int{1})
	r.set(1, upTo(500))
	r.set(2, upTo(1200), affinity(60))
	err := r.cursor.Sync(context.Background())
	if err == nil {
		t.Skip("this kernel accepts the Service")
	}
	var p *ruleset.PartialError
	if !errors.As(err, &p) || len(p.Failed) > 2 {
		t.Fatal(err)
	}
	for k := range p.Failed {
		if k.Name != "svc-2" {
			t.Errorf("%v failed", k)
		}
	}
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-2"})
	r.sync()
	r.verify()
}
