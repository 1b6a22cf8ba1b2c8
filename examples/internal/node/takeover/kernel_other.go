//go:build !linux

package takeover

import (
	"net/netip"
	"os"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// MapsToChains returns nothing.
func MapsToChains() []string { return nil }

// KubeProxyRuns returns false.
func KubeProxyRuns() bool { return false }

// ListenerIsRoots returns true.
func ListenerIsRoots(string) bool { return true }

// Marked returns nothing.
func Marked() ([]tracker.Family, error) { return nil, nil }

// Mark does nothing.
func Mark([]tracker.Family, bool) error { return nil }

// Unmark does nothing.
func Unmark() error { return nil }

// Clients holds no clients.
type Clients map[string][]netip.Addr

// ReadClients returns no clients.
func ReadClients(*os.File) (Clients, error) { return nil, nil }

// Of returns nothing.
func (Clients) Of(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration { return nil }

// WriteRecent does nothing.
func (Clients) WriteRecent(*os.File, *ruleset.Delta) error { return nil }
