package core

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestBridgeThatHidesPacketsIsReported has rules that bridged packets of one family skip.
func TestBridgeThatHidesPacketsIsReported(t *testing.T) {
	const four, six = "net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"
	h := netlab.NewHost(t)
	want4, want6 := true, true // without br_netfilter
	if _, err := os.Stat("/proc/sys/" + four); err == nil {
		want4 = false
		for name, value := range map[string]string{four: "1", six: "0"} {
			must.Do(t, h.Sysctl(name, value))
		}
	}
	var log strings.Builder
	err := h.Do(func() error {
		checkBridge([]tracker.Family{tracker.IPv4, tracker.IPv6}, slog.New(slog.NewTextHandler(&log, nil)))
		return nil
	})
	if err != nil || strings.Contains(log.String(), four) != want4 || strings.Contains(log.String(), six) != want6 {
		t.Errorf("error %v, log %q, want IPv4 %t and IPv6 %t", err, &log, want4, want6)
	}
}
