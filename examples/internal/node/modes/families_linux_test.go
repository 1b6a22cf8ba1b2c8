package modes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestFamiliesThatWorkAreServed checks nodes that lack an address family.
func TestFamiliesThatWorkAreServed(t *testing.T) {
	four, six := tracker.IPv4, tracker.IPv6
	for _, tt := range []struct {
		name string
		lack tracker.Family
		ipv6 bool
		bind string
		want string
	}{
		{"both", 0, true, "", "[IPv4 IPv6]"},
		{"no IPv6", 0, false, "", "[IPv4]"},
		{"no IPv6, and an IPv4 address", 0, false, "192.0.2.1", "[IPv4]"},
		{"no IPv6, but an IPv6 address", 0, false, "2001:db8::1", "error"},
		{"no programs for IPv6", six, true, "", "[IPv4]"},
		{"no programs for IPv4", four, true, "", "[IPv6]"},
		{"no programs for IPv4, and an IPv6 address", four, true, "2001:db8::1", "[IPv6]"},
		{"no programs for IPv4, but an IPv4 address", four, true, "192.0.2.1", "error"},
		{"nothing", four, false, "", "error"},
	} {
		m := Mode{Probe: func(_ context.Context, s Settings) error {
			if slices.Contains(s.Families, tt.lack) {
				return &dataplane.UnsupportedError{Backend: "test", Family: tt.lack, Feature: "a program"}
			}
			return nil
		}}
		c := configtest.Parsed(t, []string{"run", "--bind-address", map[bool]string{true: "0.0.0.0", false: tt.bind}[tt.bind == ""]})
		var diag strings.Builder
		got, err := servedFamilies(t.Context(), m, Settings{Config: c}, tt.ipv6, slog.New(slog.NewTextHandler(&diag, nil)))
		if s := fmt.Sprint(got); (err != nil) != (tt.want == "error") || err == nil && s != tt.want {
			t.Errorf("%s: %v, error %v, want %s", tt.name, s, err, tt.want)
		}
		if warns := strings.Contains(diag.String(), "cannot serve an address family"); err == nil && warns != (len(got) == 1) {
			t.Errorf("%s: log %q", tt.name, diag.String())
		}
	}
}

// TestTemporaryErrorTurnsNoFamilyOff probes a node that has no memory for one family at the moment.
func TestTemporaryErrorTurnsNoFamilyOff(t *testing.T) {
	c := configtest.Parsed(t, []string{"run", "--bind-address", "0.0.0.0"})
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		m := Mode{Probe: func(_ context.Context, s Settings) error {
			if slices.Contains(s.Families, f) {
				return fmt.Errorf("cannot probe kernel: %w", syscall.ENOMEM)
			}
			return nil
		}}
		if got, err := servedFamilies(t.Context(), m, Settings{Config: c}, true, slog.New(slog.DiscardHandler)); !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("no memory for %v: families %v, error %v", f, got, err)
		}
	}
}

// TestFamiliesAreServedOnceAnErrorHasPassed waits for what may pass, and for nothing else.
func TestFamiliesAreServedOnceAnErrorHasPassed(t *testing.T) {
	passes, stays := error(winkernel.ErrNoNetwork), errors.New("never there")
	c := configtest.Parsed(t, []string{"run", "--bind-address", "0.0.0.0"})
	for _, tt := range []struct {
		name     string
		failures []error
		want     string
		warnings int
	}{
		{"nothing fails", nil, "[IPv4 IPv6]", 0},
		{"both families at first", []error{passes, passes, passes, passes}, "[IPv4 IPv6]", 1},
		{"the second probe passes", []error{passes, passes}, "[IPv4 IPv6]", 1},
		{"an error that stays", []error{passes, passes, stays, stays, stays}, "error", 1},
	} {
		m := Mode{Probe: func(context.Context, Settings) error {
			if len(tt.failures) == 0 {
				return nil
			}
			err := tt.failures[0]
			tt.failures = tt.failures[1:]
			return err
		}}
		var diag strings.Builder
		got, err := waitForFamilies(t.Context(), m, Settings{Config: c}, true, time.Millisecond, slog.New(slog.NewTextHandler(&diag, nil)))
		if s := fmt.Sprint(got); (err != nil) != (tt.want == "error") || err == nil && s != tt.want {
			t.Errorf("%s: %v, error %v, want %s", tt.name, s, err, tt.want)
		}
		if n := strings.Count(diag.String(), "waiting until"); n != tt.warnings {
			t.Errorf("%s: %d warnings, want %d", tt.name, n, tt.warnings)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	m := Mode{Probe: func(context.Context, Settings) error { return passes }}
	if _, err := waitForFamilies(ctx, m, Settings{Config: c}, true, time.Hour, slog.New(slog.DiscardHandler)); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

// TestLocalhostNodePortsFollowKubeProxysRule checks when NodePorts answer at loopback
// addresses.
func TestLocalhostNodePortsFollowKubeProxysRule(t *testing.T) {
	for _, tt := range []struct {
		at   string
		flag string
		want bool
	}{
		{"", "true", true},
		{"", "false", false},
		{"primary", "true", false},
		{"localhost", "true", true},
		{"primary,localhost", "true", true},
		{"10.0.0.0/8", "true", false},
		{"10.0.0.0/8,127.0.0.0/8", "true", true},
		{"127.0.0.1/32", "true", true},
		{"0.0.0.0/0", "true", true},
		{"fd00::/8", "true", true}, // IPv4 is not restricted
	} {
		c := configtest.Parsed(t, []string{"run", "--proxy-mode", config.ModeIPTables, "--nodeport-addresses", tt.at, "--iptables-localhost-nodeports=" + tt.flag})
		if got := c.ServesLoopback(); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
		if p := c.NodePorts.Resolve(tracker.NodeInfo{}, tracker.IPv4); p.AllowsLoopback(netip.MustParseAddr("127.9.9.9")) != tt.want || p.All != (tt.at == "" || strings.HasPrefix(tt.at, "0.") || strings.HasPrefix(tt.at, "fd")) {
			t.Errorf("%+v: NodePorts are %+v", tt, p)
		}
	}
}
