//go:build linux

package takeover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"os"
	"strings"
	"time"

	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
	"github.com/go-proxier/proxier/tracker"
)

// modes are the modes that a proxy can report.
var modes = []string{"nftables", "iptables", "ipvs"}

// Rules is what the kernel has of one kind.
type Rules struct {
	Present bool
	// Stamp changes when rules are written.
	Stamp uint64
}

// tablesOf holds the names of the tables of each owner's nftables mode.
var tablesOf = map[Owner][]string{KubeProxy: {kubeProxyTable}, Nodeproxy: {"proxier", "proxier-shadow"}}

// Chains by which the owners of rules in iptables are recognized. kubelet has none of them.
// kube-proxy has chainServices in its modes iptables and ipvs, and writes it at every sync.
const (
	chainServices     = "KUBE-SERVICES"
	chainIPVSServices = "KUBE-IPVS-SERVICES" // of nodeproxy's mode ipvs only
	// chainClusterIPs is what nodeproxy's chainServices of table filter leads to.
	chainClusterIPs = "KUBE-CLUSTER-IPS"
)

// ipvsDevice has the addresses of Services in mode ipvs, of both owners.
const ipvsDevice = "kube-ipvs0"

// IPVSDevice reports whether the calling thread's network namespace has the device of mode ipvs.
func IPVSDevice() bool {
	_, err := net.InterfaceByName(ipvsDevice)
	return err == nil
}

// legacyInterval is how often Look calls Legacy at most.
const legacyInterval = time.Minute

// Kernel reads which rules exist in a network namespace. It is not safe for concurrent use.
type Kernel struct {
	// NetNS is an open file of the namespace, or nil for the calling thread's.
	NetNS *os.File
	// Legacy reports which kinds, of modes iptables and ipvs, have rules in the tables of
	// iptables-legacy. It can distinguish mode ipvs from mode iptables for nodeproxy only. Legacy may run
	// programs. Nil means that there are none.
	Legacy func(context.Context) (map[Kind]bool, error)

	// OwnDevice means that the device of mode ipvs is nodeproxy's, whatever chains there are.
	OwnDevice bool

	conn *nft.Conn
	link *netlink.Handle

	generation uint32
	looked     bool
	last       map[Kind]Rules
	deviceOf   Owner // the owner of ipvsDevice at the last look, or ""
	marked     []tracker.Family
	legacy     map[Kind]bool
	legacyAt   time.Time
}

func (k *Kernel) close() {
	if k.conn != nil {
		k.conn.Close()
		k.conn = nil
	}
	if k.link != nil {
		k.link.Close()
		k.link = nil
	}
}

// Look returns the kinds of rules that exist. While no process writes rules of nf_tables it
// makes a few small requests. Otherwise it also reads the rules of other proxies' tables in
// nf_tables, if there are any. It opens sockets and closes them again: looks are rare.
func (k *Kernel) Look(ctx context.Context) (map[Kind]Rules, error) {
	defer k.close()
	err := k.open()
	if err == nil {
		var out map[Kind]Rules
		if out, err = k.look(ctx); err == nil {
			return out, nil
		}
	}
	k.looked = false
	return nil, fmt.Errorf("cannot look for rules of other proxies: %w", err)
}

func (k *Kernel) open() (err error) {
	if k.conn == nil {
		if k.conn, err = nft.Dial(k.NetNS); err != nil {
			return err
		}
	}
	if k.link == nil {
		k.link, err = netlink.NewHandle(unix.NETLINK_ROUTE)
	}
	return err
}

func (k *Kernel) look(ctx context.Context) (map[Kind]Rules, error) {
	generation, err := k.currentGeneration(ctx)
	if err != nil {
		return nil, err
	}
	device, addresses, err := k.device()
	if err != nil {
		return nil, err
	}
	legacyBefore := k.legacy
	if k.Legacy != nil && time.Since(k.legacyAt) >= legacyInterval {
		if k.legacy, err = k.Legacy(ctx); err != nil {
			return nil, err
		}
		k.legacyAt = time.Now()
	}
	if !k.looked || generation != k.generation || !maps.Equal(k.legacy, legacyBefore) || device != (k.deviceOf != "") {
		now, err := k.readRules(ctx, device)
		if errors.Is(err, nft.ErrInterrupted) && k.looked {
			return k.last, nil // the next look tries again
		}
		if err != nil {
			return nil, err
		}
		k.last, k.generation, k.looked = now, generation, true
	}
	if k.deviceOf != "" {
		k.last[Kind{k.deviceOf, "ipvs"}] = Rules{Present: true, Stamp: addresses}
	}
	return k.last, nil
}

// Marked returns the address families that had a marker at the last look. The caller must not
// change it.
func (k *Kernel) Marked() []tracker.Family { return k.marked }

// currentGeneration returns the number of transactions of nf_tables, which wraps around.
func (k *Kernel) currentGeneration(ctx context.Context) (gen uint32, err error) {
	r := nft.Request{Type: unix.NFT_MSG_GETGEN, Family: unix.AF_UNSPEC}
	err = k.get(ctx, r, func(typ uint16, data []byte) {
		if typ == unix.NFTA_GEN_ID {
			gen = uint32(nft.Uint(data))
		}
	})
	return gen, err
}

// readRules reads everything but addresses. device reports that ipvsDevice exists.
func (k *Kernel) readRules(ctx context.Context, device bool) (map[Kind]Rules, error) {
	out := map[Kind]Rules{}
	for owner, names := range tablesOf {
		var rules Rules
		for _, name := range names {
			if err := k.addTable(ctx, &rules, name); err != nil {
				return nil, err
			}
		}
		out[Kind{owner, "nftables"}] = rules
	}
	marked, err := k.markers(ctx)
	if err != nil {
		return nil, err
	}
	k.marked = marked
	if own := (Kind{Nodeproxy, "nftables"}); len(marked) != 0 {
		out[own] = Rules{Present: true, Stamp: out[own].Stamp}
	}
	var services, own Rules
	filled, err := k.addChain(ctx, &services, chainServices)
	_, err2 := k.addChain(ctx, &own, chainIPVSServices)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	// kube-proxy's mode ipvs has KUBE-SERVICES, too.
	ipvs := KubeProxy
	if k.OwnDevice || own.Present || k.legacy[Kind{Nodeproxy, "ipvs"}] {
		ipvs = Nodeproxy
	}
	for kind, present := range k.legacy {
		if kind.Mode == "iptables" {
			out[kind] = Rules{Present: present}
		}
	}
	// A clean-up leaves an empty chain that another program's rule leads to. No proxy does.
	if filled {
		kind, err := k.writer(ctx)
		if err != nil {
			return nil, err
		}
		out[kind] = services
	}
	k.deviceOf = ""
	if device {
		k.deviceOf = ipvs
		out[Kind{ipvs, "ipvs"}] = Rules{Present: true}
		if ipvs == KubeProxy {
			delete(out, Kind{KubeProxy, "iptables"})
		}
	}
	return out, nil
}

// writer returns who wrote KUBE-SERVICES of iptables-nft last, and in which mode: only kube-proxy's mode
// ipvs matches sets there.
func (k *Kernel) writer(ctx context.Context) (Kind, error) {
	kind := Kind{KubeProxy, "iptables"}
	for _, family := range families {
		for _, table := range []string{"nat", "filter"} {
			r := nft.Request{Type: unix.NFT_MSG_GETRULE, Family: family, Flags: nl.Dump,
				Attrs: []nl.Attribute{nft.String(unix.NFTA_RULE_TABLE, table), nft.String(unix.NFTA_RULE_CHAIN, chainServices)}}
			err := k.get(ctx, r, func(typ uint16, data []byte) {
				switch {
				case typ != unix.NFTA_RULE_EXPRESSIONS:
				case table == "nat" && matchesSet(data):
					kind = Kind{KubeProxy, "ipvs"}
				case table == "filter" && bytes.Contains(data, []byte(chainClusterIPs+"\x00")):
					kind = Kind{Nodeproxy, "iptables"}
				}
			})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return Kind{}, err
			}
		}
	}
	return kind, nil
}

// matchesSet reports whether one of a rule's expressions is iptables' match of a set.
func matchesSet(expressions []byte) bool {
	for _, expression := range nft.Attributes(expressions) {
		for typ, data := range nft.Attributes(expression) {
			for attr, name := range nft.Attributes(data) {
				if typ == unix.NFTA_EXPR_DATA && attr == unix.NFTA_MATCH_NAME && string(name) == "set\x00" {
					return true
				}
			}
		}
	}
	return false
}

var families = []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}

// addTable adds a table, in both families, to rules.
func (k *Kernel) addTable(ctx context.Context, rules *Rules, name string) error {
	for _, family := range families {
		found, err := k.exists(ctx, unix.NFT_MSG_GETTABLE, family, nft.String(unix.NFTA_TABLE_NAME, name))
		if err != nil {
			return err
		}
		if found && name == kubeProxyTable {
			marker, err := k.isMarker(ctx, family)
			if err != nil {
				return err
			}
			found = !marker
		}
		if found {
			if _, err := k.addRules(ctx, rules, family, nft.String(unix.NFTA_RULE_TABLE, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// addChain adds a chain of iptables-nft's tables nat to rules. It reports whether the chain has any.
func (k *Kernel) addChain(ctx context.Context, rules *Rules, name string) (filled bool, err error) {
	for _, family := range families {
		found, err := k.exists(ctx, unix.NFT_MSG_GETCHAIN, family, nft.String(unix.NFTA_CHAIN_TABLE, "nat"), nft.String(unix.NFTA_CHAIN_NAME, name))
		if found {
			var n int
			n, err = k.addRules(ctx, rules, family, nft.String(unix.NFTA_RULE_TABLE, "nat"), nft.String(unix.NFTA_RULE_CHAIN, name))
			filled = filled || n != 0
		}
		if err != nil {
			return false, err
		}
	}
	return filled, nil
}

// exists reports whether an object exists.
func (k *Kernel) exists(ctx context.Context, typ uint16, family uint8, attrs ...nl.Attribute) (bool, error) {
	_, err := k.conn.Get(ctx, nft.Request{Type: typ, Family: family, Attrs: attrs})
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// addRules adds the rules that attrs select to rules, and mixes their handles into the stamp. The
// kernel gives a handle to a rule once. It returns the number of rules.
func (k *Kernel) addRules(ctx context.Context, rules *Rules, family uint8, attrs ...nl.Attribute) (n int, err error) {
	rules.Present = true
	h := fnv.New64a()
	fmt.Fprint(h, rules.Stamp, family)
	err = k.get(ctx, nft.Request{Type: unix.NFT_MSG_GETRULE, Family: family, Flags: nl.Dump, Attrs: attrs},
		func(typ uint16, data []byte) {
			if typ == unix.NFTA_RULE_HANDLE {
				h.Write(data)
				n++
			}
		})
	rules.Stamp = h.Sum64()
	return n, err
}

// get calls fn with each attribute of each object of an answer.
func (k *Kernel) get(ctx context.Context, r nft.Request, fn func(typ uint16, data []byte)) error {
	objects, err := k.conn.Get(ctx, r)
	for _, attrs := range objects {
		for typ, data := range nft.Attributes(attrs) {
			fn(typ, data)
		}
	}
	return err
}

// device reports whether ipvsDevice exists, and a hash of its addresses.
func (k *Kernel) device() (exists bool, stamp uint64, err error) {
	link, err := k.link.LinkByName(ipvsDevice)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return false, 0, nil
	}
	if err != nil {
		return false, 0, err
	}
	addrs, err := k.link.AddrList(link, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return false, 0, err
	}
	h := fnv.New64a()
	for _, a := range addrs {
		h.Write([]byte(strings.TrimSpace(a.IPNet.String())))
	}
	return true, h.Sum64(), nil
}
