//go:build linux

package kernel

import (
	"os"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// SendBuffer is the size of the send buffer for [Dial], in bytes: enough for a million elements. The kernel allocates
// memory only as needed.
const SendBuffer = 256 << 20

// Conn is an [nft.Conn] that reads tables of IPv4 and IPv6.
type Conn struct{ *nft.Conn }

// Dial opens a socket as [nft.Dial] does.
func Dial(ns *os.File, sendBuffer int) (*Conn, error) {
	c, err := nft.Dial(ns, sendBuffer)
	return &Conn{c}, err
}

// Table reads a table without its contents.
func (c *Conn) Table(name string, f tracker.Family) (nft.Head, error) {
	return c.Conn.Table(name, inet.AF(f))
}

// Chains returns the table's chains by name.
func (c *Conn) Chains(table string, f tracker.Family) (map[string]nft.Chain, error) {
	return c.Conn.Chains(table, inet.AF(f))
}

// Sets returns the table's named sets and maps by name.
func (c *Conn) Sets(table string, f tracker.Family) (map[string]nft.Set, error) {
	return c.Conn.Sets(table, inet.AF(f))
}

// Flowtables returns the table's flowtables by name.
func (c *Conn) Flowtables(table string, f tracker.Family) (map[string]nft.Flowtable, error) {
	return c.Conn.Flowtables(table, inet.AF(f))
}

// Rules returns the table's rules.
func (c *Conn) Rules(table string, f tracker.Family) ([]nft.Rule, error) {
	return c.Conn.Rules(table, inet.AF(f))
}

// Elements calls fn with each element of a set. The element is valid only during the call.
func (c *Conn) Elements(table string, f tracker.Family, s layout.Set, fn func(nft.Element)) error {
	return c.Conn.Elements(table, inet.AF(f), s.Name(), fn)
}

// HasBaseChain reports whether the table exists and has the base chain of a name.
func (c *Conn) HasBaseChain(table string, f tracker.Family, chain string) (bool, error) {
	return c.Conn.HasBaseChain(table, inet.AF(f), chain)
}
