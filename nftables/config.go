//go:build linux

package nftables

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/tracker"
)

// DefaultTable is the name of the tables a [Backend] owns unless told otherwise.
const DefaultTable = "proxier"

// DefaultMasqueradeBit is the bit of the packet mark that asks for masquerading
// unless told otherwise: kube-proxy's, so that both leave the same bit to others.
const DefaultMasqueradeBit = 14

// Config says what a [Backend] is to own. The zero value is a node's usual
// configuration.
type Config struct {
	// Table is the name of the backend's table in each family, 1 to 55 bytes
	// without blanks or slashes; "" is [DefaultTable]. Everything in it belongs to
	// the backend, and nothing outside it is touched, but for a table of the same
	// name with "-shadow" behind it: see [Backend.Apply]. So a name may not end
	// like that, nor be "proxier-probe".
	Table string
	// Families is the address families to program; nil is both. Services of another
	// family are passed over.
	Families []tracker.Family
	// MasqueradeBit is the bit of the packet mark, 0 to 31, by which rules tell each
	// other that a connection is to be masqueraded; nil is [DefaultMasqueradeBit].
	// No other bit is read or written.
	MasqueradeBit *uint8
	// StickyClients is how many clients are remembered at the most, in each family,
	// over all Services with client affinity; 0 is 1,048,576. Beyond it, new clients
	// are served without being remembered. A remembered client costs the kernel
	// about 130 bytes. A table that is there already is taken over with the clients
	// that it remembers, and with its own bound; one that takes its place (see
	// [Backend.Apply]) has the new bound, and remembers no more of its clients.
	StickyClients int
	// NetNS is an open file of the network namespace to program; nil is the namespace
	// of the thread that calls [New]. New duplicates the file, and working in a
	// namespace other than the process's needs CAP_SYS_ADMIN.
	NetNS *os.File
	// Log is told of repairs and of Services that cannot be programmed; nil is
	// silence.
	Log *slog.Logger
}

// maxName is the longest name a table can be given, in bytes.
const maxName = 55

// defaultStickyClients bounds the dynamic set of remembered clients.
const defaultStickyClients = 1 << 20

// withDefaults returns c with what was left out filled in.
func (c Config) withDefaults() (Config, error) {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	if len(c.Table) > maxName || strings.ContainsAny(c.Table, " \t\n/\"{};\x00") {
		return c, fmt.Errorf("nftables: table name %q is not 1 to 55 bytes without blanks, quotes or slashes", c.Table)
	}
	if strings.HasSuffix(c.Table, shadowOf("")) || c.Table == probeTable {
		return c, fmt.Errorf("nftables: table name %q is for the backend's own use", c.Table)
	}
	if c.Families == nil {
		c.Families = []tracker.Family{tracker.IPv4, tracker.IPv6}
	}
	seen := map[tracker.Family]bool{}
	for _, f := range c.Families {
		if f != tracker.IPv4 && f != tracker.IPv6 || seen[f] {
			return c, fmt.Errorf("nftables: families %v are not one or both of IPv4 and IPv6", c.Families)
		}
		seen[f] = true
	}
	if len(c.Families) == 0 {
		return c, fmt.Errorf("nftables: no family to program")
	}
	if c.MasqueradeBit == nil {
		usual := uint8(DefaultMasqueradeBit)
		c.MasqueradeBit = &usual
	}
	bit := *c.MasqueradeBit // the caller's variables may change
	c.MasqueradeBit, c.Families = &bit, slices.Clone(c.Families)
	if bit > 31 {
		return c, fmt.Errorf("nftables: masquerade bit %d is not 0 to 31", bit)
	}
	if c.StickyClients == 0 {
		c.StickyClients = defaultStickyClients
	}
	if c.StickyClients < 0 || c.StickyClients > 1<<24 {
		return c, fmt.Errorf("nftables: %d sticky clients is not 1 to %d", c.StickyClients, 1<<24)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

func (c Config) mark() uint32 { return 1 << *c.MasqueradeBit }
