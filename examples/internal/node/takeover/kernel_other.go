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

// modes are the modes that a proxy can report: that of Windows.
var modes = []string{"kernelspace"}

// Rules is what the kernel has of one kind.
type Rules struct {
	Present bool
	// Stamp changes when rules are written.
	Stamp uint64
}

// Kernel finds no rules: what proxies write on other systems than Linux does not tell its owner.
type Kernel struct {
	NetNS  *os.File
	Legacy func(context.Context) (map[Kind]bool, error)
	// OwnDevice has no effect here.
	OwnDevice bool
}

// Look returns nothing.
func (k *Kernel) Look(context.Context) (map[Kind]Rules, error) { return nil, nil }

// Marked returns nothing.
func (k *Kernel) Marked() []tracker.Family { return nil }

// KubeProxyRuns returns false.
func KubeProxyRuns() bool { return false }

// ListenerIsRoots returns true.
func ListenerIsRoots(string) bool { return true }

// Mark does nothing.
func Mark([]tracker.Family) error { return nil }

// Replace does nothing.
func Replace(context.Context, []tracker.Family) error { return nil }

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
