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
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

// Chains by which the owners of rules in iptables are recognized. kubelet has none of them.
// kube-proxy has chainServices in its modes iptables and ipvs, and writes it at every sync.
const (
	chainServices     = "KUBE-SERVICES"
	chainIPVSServices = "KUBE-IPVS-SERVICES" // of nodeproxy's mode ipvs only
	// chainClusterIPs is what nodeproxy's chainServices of table filter leads to.
	chainClusterIPs = "KUBE-CLUSTER-IPS"
)

// IPVSDevice returns the device that has the addresses of Services in mode ipvs, of both owners, in
// the calling thread's network namespace, or nil.
func IPVSDevice() *net.Interface {
	device, err := net.InterfaceByName("kube-ipvs0")
	if err != nil {
		return nil
	}
	return device
}

// Look returns the kinds of rules that exist in the calling thread's network namespace. Each has a
// stamp that is not 0 and changes when the rules are written. legacy has the kinds with rules in
// iptables-legacy. ownDevice means that the device of mode ipvs is nodeproxy's, whatever chains there are.
func Look(ctx context.Context, legacy map[Kind]bool, ownDevice bool) (kinds map[Kind]uint64, err error) {
	marked, err := Marked()
	if err != nil {
		return nil, err
	}
	conn, err := nft.Dial(nil, sendBuffer)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	err = nfnl.Again(ctx, func() error {
		r := reader{Conn: conn}
		kinds = r.look(legacy, ownDevice)
		return r.err
	})
	if err != nil {
		return nil, fmt.Errorf("cannot look for rules of other proxies: %w", err)
	}
	if len(marked) != 0 {
		kinds[Kind{Nodeproxy, "nftables"}] |= 1
	}
	return kinds, nil
}

// reader reads rules until the first error.
type reader struct {
	*nft.Conn
	err error
}

// sendBuffer is the size of the buffer for requests, in bytes.
const sendBuffer = 1 << 16

func (r *reader) look(legacy map[Kind]bool, ownDevice bool) map[Kind]uint64 {
	kinds := map[Kind]uint64{
		{KubeProxy, "nftables"}: r.rules(kubeProxyTable, "", nil),
		{Nodeproxy, "nftables"}: r.rules("proxier", "", nil) ^ r.rules("proxier-shadow", "", nil),
	}
	for kind, present := range legacy {
		if present {
			kinds[kind] = 1
		}
	}
	// Only kube-proxy's mode ipvs matches sets in its chain. A clean-up leaves an empty chain that
	// another program's rule leads to. No proxy does.
	writer := Kind{KubeProxy, "iptables"}
	services := r.rules("nat", chainServices, func(expressions []byte) {
		if matchesSet(expressions) {
			writer.Mode = "ipvs"
		}
	})
	r.rules("filter", chainServices, func(expressions []byte) {
		if bytes.Contains(expressions, []byte(chainClusterIPs+"\x00")) {
			writer = Kind{Nodeproxy, "iptables"}
		}
	})
	kinds[writer] ^= services
	if device := IPVSDevice(); device != nil {
		owner := KubeProxy
		if ownDevice || legacy[Kind{Nodeproxy, "ipvs"}] || r.rules("nat", chainIPVSServices, nil) != 0 {
			owner = Nodeproxy
		}
		if owner == KubeProxy {
			delete(kinds, Kind{KubeProxy, "iptables"}) // mode ipvs has KUBE-SERVICES, too
		}
		h := fnv.New64a()
		addrs, _ := device.Addrs()
		for _, a := range addrs {
			fmt.Fprintln(h, a)
		}
		kinds[Kind{owner, "ipvs"}] ^= h.Sum64() | 1<<63
	}
	maps.DeleteFunc(kinds, func(_ Kind, stamp uint64) bool { return stamp == 0 })
	return kinds
}

// rules returns a hash of the handles of a table's rules, or of one chain's, in both families, or 0 if
// there are no rules. The kernel gives a handle to a rule once. see, if not nil, is called with the
// expressions of each rule.
func (r *reader) rules(table, chain string, see func(expressions []byte)) uint64 {
	h, found := fnv.New64a(), false
	for _, family := range families {
		attrs := nfnl.AppendString(nil, unix.NFTA_RULE_TABLE, table)
		if chain != "" {
			attrs = nfnl.AppendString(attrs, unix.NFTA_RULE_CHAIN, chain)
		}
		h.Write([]byte{inet.AF(family)})
		err := r.Get(unix.NFT_MSG_GETRULE, inet.AF(family), true, attrs, func(rule []byte) error {
			for typ, data := range nfnl.Attributes(rule) {
				switch {
				case typ == unix.NFTA_RULE_HANDLE:
					h.Write(data)
					found = true
				case typ == unix.NFTA_RULE_EXPRESSIONS && see != nil:
					see(data)
				}
			}
			return nil
		})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			r.err = err
		}
	}
	if !found {
		return 0
	}
	return h.Sum64() | 1
}

// MapsToChains returns the verdict maps in the tables of iptables that lead to chains of kube-proxy, such as
// "map ip nat portals (to KUBE-MARK-MASQ)", as far as they can be read.
func MapsToChains() (out []string) {
	conn, err := nft.Dial(nil, sendBuffer)
	if err != nil {
		return nil
	}
	defer conn.Close()
	for family, name := range map[tracker.Family]string{tracker.IPv4: "ip", tracker.IPv6: "ip6"} {
		for _, table := range []string{"nat", "filter"} {
			sets, _ := conn.Sets(table, inet.AF(family))
			for set, spec := range sets {
				if spec.DataType != nft.DataVerdict {
					continue
				}
				_ = conn.Elements(table, inet.AF(family), set, func(e nft.Element) {
					if strings.HasPrefix(e.Chain, "KUBE-") {
						out = append(out, fmt.Sprintf("map %s %s %s (to %s)", name, table, nft.Printable(set), e.Chain))
					}
				})
			}
		}
	}
	return out
}

// matchesSet reports whether one of a rule's expressions is iptables' match of a set.
func matchesSet(expressions []byte) bool {
	for _, expression := range nfnl.Attributes(expressions) {
		for typ, data := range nfnl.Attributes(expression) {
			for attr, name := range nfnl.Attributes(data) {
				if typ == unix.NFTA_EXPR_DATA && attr == unix.NFTA_MATCH_NAME && string(name) == "set\x00" {
					return true
				}
			}
		}
	}
	return false
}

var families = []tracker.Family{tracker.IPv4, tracker.IPv6}
