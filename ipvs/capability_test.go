//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/backendtest"
	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/iptables"
)

// testLeastPrivilege has processes with few capabilities do all that a Backend does.
// IPVS, ipset and the device take CAP_NET_ADMIN. The match for sets, in either
// variant of iptables, opens a raw socket.
func testLeastPrivilege(t *testing.T) {
	h := newHost(t)
	admin, raw := unix.CAP_NET_ADMIN, unix.CAP_NET_RAW
	for _, c := range []struct {
		role         string
		capabilities []int
		want         string // what is said, "" if they are enough
	}{
		{"everything", []int{admin, raw}, ""},
		{"everything legacy", []int{admin, raw}, ""},
		{"everything", []int{admin}, "iptables-nft-restore"},
		{"everything", []int{raw, unix.CAP_SYS_ADMIN, unix.CAP_SYS_MODULE, unix.CAP_DAC_OVERRIDE}, "CAP_NET_ADMIN is needed"},
	} {
		var said strings.Builder
		cmd := confine.Command(c.role, confine.Limits{Capabilities: c.capabilities})
		cmd.Stderr = &said
		if err := h.Start(cmd); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		if (err == nil) != (c.want == "") || !strings.Contains(said.String(), c.want) {
			t.Errorf("%s with capabilities %v: %v, %s; want %q", c.role, c.capabilities, err, said.String(), c.want)
		}
		if err == nil {
			continue
		}
		// It has left no Service half done.
		if got := lines(t, h, "ipvsadm -Sn"); len(got) != 0 {
			t.Errorf("%s with capabilities %v has left %q", c.role, c.capabilities, got)
		}
	}
}

// everything is what a Backend does from its first day to its last.
func everything(variant iptables.Flavour) error {
	ctx := context.Background()
	c := Config{IPTables: variant}
	a, err := newAgent(c)
	if err != nil {
		return err
	}
	defer a.backend.Close()
	for i := range 4 {
		a.tracker.SetService(svc(i, nodePort(30000+int32(i)), externalLocal, affinity(100), externalIPs(fmt.Sprint("198.18.0.", i))))
		a.tracker.SetSlice(slice(i, v1.ProtocolTCP, 1, -1, -2))
	}
	return backendtest.Life{
		Cursor:  a.cursor,
		Change:  func() { a.tracker.SetSlice(slice(0, v1.ProtocolTCP, -1, -2, -3, 4, 5)) },
		Tend:    func(ctx context.Context) error { return a.backend.Tend(ctx, time.Now()) },
		Check:   a.backend.Check,
		Owned:   func(ctx context.Context) (bool, error) { return Owned(ctx, c) },
		Cleanup: func(ctx context.Context) error { return Cleanup(ctx, c) },
	}.Run(ctx)
}
