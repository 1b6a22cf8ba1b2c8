//go:build !linux

package takeover

import (
	"context"
	"net/netip"
	"os"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Look returns nothing: what proxies write on other systems than Linux does not tell its owner.
func Look(context.Context, map[Kind]bool, bool) (map[Kind]uint64, error) { return nil, nil }

// KubeProxyRuns returns false.
func KubeProxyRuns() bool { return false }

// ListenerIsRoots returns true.
func ListenerIsRoots(string) bool { return true }

// Marked returns nothing.
func Marked(context.Context) ([]tracker.Family, error) { return nil, nil }

// Mark does nothing.
func Mark([]tracker.Family, bool) error { return nil }

// Unmark does nothing.
func Unmark(context.Context) error { return nil }

// Clients holds no clients.
type Clients struct{}

// ReadClients returns no clients.
func ReadClients(context.Context, *os.File) (*Clients, error) { return &Clients{}, nil }

// Of returns nothing.
func (c *Clients) Of(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration { return nil }

// WriteRecent does nothing.
func (c *Clients) WriteRecent(*os.File, *ruleset.Port) error { return nil }
