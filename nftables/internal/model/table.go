package model

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Config configures tables.
type Config struct {
	// Plain and Sticky are the largest numbers of pools of one family, without and with client
	// affinity.
	Plain, Sticky uint32
	// Clients is the number of clients of Services with client affinity that a table remembers, about 130 bytes of
	// kernel memory each. A table that is rewritten in place keeps its clients and its old limit.
	Clients int
	// GracePeriod is how long an endpoint's connections to itself are still masqueraded after the
	// endpoint is gone.
	GracePeriod time.Duration
	// FastPath is set if the tables have a flowtable.
	FastPath bool
}

// DefaultConfig has the limits of the encoding.
var DefaultConfig = Config{Plain: layout.MaxPool, Sticky: layout.MaxSticky, Clients: 1 << 20, GracePeriod: time.Second}

// Table is the model of one family's table: its state in the kernel after the transactions that
// were built. Each department has the sets and maps that it alone changes.
type Table struct {
	Family tracker.Family
	common *common
	// services is indexed by the Service's ID.
	services      []*service
	before, after wanted // buffers
	Room          room
	Pools         pools
	Chains        chains
	Frontends     frontends
	Hairpin       hairpin
	Intervals     intervals
	Affinity      affinity
}

// common is what all departments of a table read.
type common struct {
	family tracker.Family
	node   *ruleset.Node
	config Config
}

// Errors about one Service.
var (
	ErrTooManyPools  = fmt.Errorf("too many Services with endpoints (at most %d pools a family)", layout.MaxPool)
	errTooManySticky = fmt.Errorf("too many Services have client affinity (at most %d pools a family)", layout.MaxSticky)
	// ErrTooLarge is wrapped by the error of a transaction that is larger than the socket can send: the kernel
	// accepts a transaction only in one piece. A send buffer larger than net.core.wmem_max needs CAP_NET_ADMIN in the
	// initial user namespace.
	ErrTooLarge = nft.ErrTooLarge
)

// ErrOverflow is returned if the sets need more room. It requires a full delta.
var ErrOverflow = errors.New("a set has more elements than its size")

// NewTable returns the model of an empty table for the Services in changes. endpoints is the number
// of endpoints in their grace period.
func NewTable(f tracker.Family, n *ruleset.Node, c Config, changes []ruleset.Change, endpoints int) *Table {
	all := &common{family: f, node: n, config: c}
	verdicts := map[layout.Set]map[uint32]string{}
	for s := range layout.FirstAllowed {
		if s.Verdicts() {
			verdicts[s] = map[uint32]string{}
		}
	}
	return &Table{
		Family: f, common: all,
		Room:  newRoom(all, changes, endpoints),
		Pools: pools{common: all, plain: numbers{max: c.Plain}, sticky: numbers{max: c.Sticky}},
		Chains: chains{
			common: all, stickyNumbers: numbers{max: layout.MaxStickyHandlers},
			handlers: map[layout.Handler]uint32{}, sticky: map[layout.StickyHandler]stickyEntry{},
			verdicts: verdicts, objects: map[string]Object{}, garbage: map[string]bool{},
		},
		Frontends: frontends{common: all, clusterIPs: uses{}, prefixes: map[int]bool{}, longNames: map[layout.Octets]tracker.Key{}},
		Hairpin:   hairpin{common: all, refs: uses{}},
		Intervals: intervals{common: all, ranges: map[layout.Set][]Range{}},
		Affinity:  affinity{common: all, lacking: map[uint32]*ruleset.Port{}},
	}
}

// Create adds all sets, chains and rules that do not depend on the Services, except base chains and
// the sets in kept. keptFlowtable reports that the flowtable stays.
func (t *Table) Create(kept map[layout.Set]bool, keptFlowtable bool, tx *Tx) {
	for s := layout.VersionSet; s < layout.FirstAllowed; s++ {
		if t.Has(s) && !kept[s] {
			tx.Object(Object{Kind: NewSet, Family: t.Family, Set: s, Size: t.Room.Size(s)})
		}
	}
	if t.common.config.FastPath && !keptFlowtable {
		tx.Object(Object{Kind: NewFlowtable, Family: t.Family})
	}
	tx.Object(Object{Kind: FixedChains, Family: t.Family})
	tx.add(t.Family, &layout.Element{Set: layout.VersionSet, Key: word(layout.Version)}, "version of the layout of this table")
	t.Intervals.setNodePortIPs(tx)
}

// Hook adds the base chains, by which packets meet the table.
func (t *Table) Hook(tx *Tx) { tx.Object(Object{Kind: BaseChains, Family: t.Family}) }

// CreateAll adds an object of every kind, for probing the kernel.
func (t *Table) CreateAll(tx *Tx) {
	t.Create(nil, false, tx)
	t.Hook(tx)
	const buckets = layout.ExactBuckets + 4
	for h := layout.HandleNotPods; h <= layout.HandleDrop; h++ {
		c := layout.Handler{Handling: h, Firewall: true}
		if h < layout.HandleInternalOrDrop {
			c.Buckets = buckets
		}
		t.Chains.handler(c, false, tx)
	}
	t.Chains.handler(layout.Handler{Sticky: true}, true, tx)
	t.Chains.stickyHandler(layout.StickyHandler{Buckets: buckets, Seconds: 10800}, tx)
	t.Chains.handler(layout.Handler{Buckets: 251, Hash: tracker.HashSourcePort}, false, tx)
	t.Frontends.prefix(t.Family.Bits()/2, tx)
}

// Node returns the node that the table is for.
func (t *Table) Node() *ruleset.Node { return t.common.node }

// SetNode sets the node and makes the interval sets agree with it. They depend on the node alone.
func (t *Table) SetNode(n *ruleset.Node, tx *Tx) {
	t.common.node = n
	t.Intervals.setNodePortIPs(tx)
	t.Intervals.setServiceCIDRs(tx)
}

// NeedsRewrite reports whether the node n differs from the table's in fields that rules of many
// chains, or the elements of every endpoint, depend on.
func (t *Table) NeedsRewrite(n *ruleset.Node) bool {
	old := t.common.node
	return old.Info.Name != n.Info.Name || old.HashSeed != n.HashSeed ||
		old.LocalTraffic.Bridge != n.LocalTraffic.Bridge ||
		old.LocalTraffic.InterfacePrefix != n.LocalTraffic.InterfacePrefix ||
		OwnNodePorts(old, tracker.IPv4) != OwnNodePorts(n, tracker.IPv4) || OwnNodePorts(old, tracker.IPv6) != OwnNodePorts(n, tracker.IPv6) ||
		!slices.Equal(old.LocalTraffic.CIDRs, n.LocalTraffic.CIDRs)
}

// Has reports whether the table has the set. Some exist only if they are needed.
func (t *Table) Has(s layout.Set) bool {
	switch {
	case s >= layout.FirstAllowed:
		return t.Frontends.prefixes[int(s-layout.FirstAllowed)]
	case s == layout.FastPathInterfaces:
		return t.common.config.FastPath
	}
	return true
}
