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

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/iptables"
)

// testFewCapabilitiesAreEnough uses every function of a Backend in processes with few
// capabilities. IPVS, ipset and the device need CAP_NET_ADMIN. The match for sets, in
// either variant of iptables, opens a raw socket.
func testFewCapabilitiesAreEnough(t *testing.T) {
	h := newHost(t)
	admin, raw := unix.CAP_NET_ADMIN, unix.CAP_NET_RAW
	for _, c := range []struct {
		role         string
		capabilities []int
		want         string // text of the error, "" if they are enough
	}{
		{"everything", []int{admin, raw}, ""},
		{"everything legacy", []int{admin, raw}, ""},
		{"everything", []int{admin}, "iptables-nft-restore"},
		{"everything", []int{raw, unix.CAP_SYS_ADMIN, unix.CAP_SYS_MODULE, unix.CAP_DAC_OVERRIDE}, "CAP_NET_ADMIN is needed"},
	} {
		var output strings.Builder
		cmd := confine.Command(c.role, confine.Limits{Capabilities: c.capabilities})
		cmd.Stderr = &output
		must.Do(t, h.Start(cmd))
		err := cmd.Wait()
		if (err == nil) != (c.want == "") || !strings.Contains(output.String(), c.want) {
			t.Errorf("%s with capabilities %v: %v, %s; want %q", c.role, c.capabilities, err, output.String(), c.want)
		}
		if err == nil {
			continue
		}
		// A failed process must leave nothing.
		if got := lines(t, h, "ipvsadm -Sn"); len(got) != 0 {
			t.Errorf("%s with capabilities %v left %q", c.role, c.capabilities, got)
		}
	}
}

// everything uses every function of a Backend, from New to Cleanup.
func everything(variant iptables.Flavor) error {
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
		Tend:    func(ctx context.Context) error { return a.backend.tend(ctx, time.Now()) },
		Check:   a.backend.Check,
		Owned:   func(ctx context.Context) (bool, error) { return Owned(ctx, c) },
		Cleanup: func(ctx context.Context) error { return Cleanup(ctx, c) },
	}.Run(ctx)
}
