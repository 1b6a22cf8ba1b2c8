//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
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
	if err := a.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("first full delta: %w", err)
	}
	a.tracker.SetSlice(slice(0, v1.ProtocolTCP, -1, -2, -3, 4, 5))
	if err := a.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("change: %w", err)
	}
	if err := a.backend.Tend(ctx, time.Now()); err != nil {
		return fmt.Errorf("tend: %w", err)
	}
	if err := a.backend.Check(ctx); err != nil {
		return fmt.Errorf("check: %w", err)
	}
	a.cursor.Resync()
	if err := a.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("full delta: %w", err)
	}
	if owned, err := Owned(ctx, c); !owned || err != nil {
		return fmt.Errorf("owned: %v, %w", owned, err)
	}
	if err := Cleanup(ctx, c); err != nil {
		return fmt.Errorf("clean-up: %w", err)
	}
	if err := a.backend.Check(ctx); !errors.Is(err, ruleset.ErrNeedFull) {
		return fmt.Errorf("check after clean-up: %w", err)
	}
	return nil
}

func affinity(seconds int32) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
}
